-- Reopening an ended task: the fields dropped with its end, and the journals of child runs that were open at its end or
-- have failed, which stay while a dead letter may reopen the task. They wait for the reopened run to request the child
-- runs again.

-- Fields that are dropped with the end of a task, besides steps without a result: a reopened run must not see them.
local OF_ONE_LIFE = {
  [RUN.attempts] = true, [RUN.override_from] = true, [RUN.after_change] = true, [RUN.last_change] = true,
  [RUN.unseen] = true, [RUN.request] = true, [TASK.child] = true, [TASK.timer] = true,
}

-- Answers that were held back are results: the child runs that gave them are gone.
local function keep_held_back(rk)
  local all = all_held_back(rk)
  for i = 1, #all, 4 do
    local missing = redis.call('HGET', rk, RUN.missing .. all[i])
    if missing then
      redis.call('HSET', rk, RUN.result .. all[i], digest_of(missing) .. all[i + 1] .. all[i + 2] .. all[i + 3])
      redis.call('HDEL', rk, RUN.missing .. all[i])
    end
  end
  if #all > 0 then redis.call('HDEL', rk, RUN.held_back) end
end

-- Removes the steps that a run waited for, and the fields `gone`. A call that may not be repeated stays missing while
-- its mark exists: its holder commits its result, or that its outcome is unknown. If the task continues (`goes_on`), so
-- do child runs: they stay missing too. Returns whether the run has a journal.
local function forget_waits(base, task, run, gone, goes_on)
  local rk, has_journal = run_key(base, task, run), false
  keep_held_back(rk)
  for _, name in ipairs(redis.call('HKEYS', rk)) do
    local prefix, step = string.sub(name, 1, 2), string.sub(name, 3)
    local missing = prefix == RUN.missing and redis.call('HGET', rk, name)
    if missing and (goes_on and kind_of(missing) == KIND.agent
      or redis.pcall('HEXISTS', base .. 'started', task .. '/' .. run .. '/' .. step) == 1) then
      redis.call('HSET', rk, name, digest_of(missing) .. kind_of(missing) .. WAKES.never)
      has_journal = true
    elseif missing or OF_ONE_LIFE[prefix] or string.find(name, '^g%d+$') then
      gone[#gone + 1] = name
    elseif prefix == RUN.result or prefix == RUN.emitted then
      has_journal = true
    end
  end
  delete_fields(rk, gone)
  return has_journal
end

-- A run that has ended continues without a key that it had given up, even if it had it again: it takes it again where
-- the last block ends, with the state of then. Adds the fields to drop to `gone`.
function KEY.keep(rk, gone)
  local released = redis.call('HGET', rk, RUN.released)
  if not released or released == 'k' then
    gone[#gone + 1] = RUN.state_at_start
    return
  end
  if string.sub(released, 1, 1) == 'a' then gone[#gone + 1] = RUN.result .. string.sub(released, 2) end
  redis.call('HSET', rk, RUN.released, 'r')
end

-- Keeps the journal of a child run for the run that called it: the child has failed (`goes_on`: its task has not
-- ended), or was open when its task ended. Without `current`, no commit, resume or redrive finds the run meanwhile.
-- Returns whether there is a journal.
local function keep_child(base, task, run, digest, goes_on)
  local gone = {RUN.current, RUN.unrecorded, RUN.turn_owner, RUN.asks_in_turn, RUN.open_asks, RUN.override}
  KEY.keep(run_key(base, task, run), gone)
  if not forget_waits(base, task, run, gone, goes_on) then return false end
  redis.call('HSET', base .. 'task:' .. task, TASK.kept_child .. run, digest)
  return true
end

-- Deletes the journal of the child run that a task's field names, if the field is of a kept one.
local function drop_kept_child(base, task, field)
  if string.sub(field, 1, 2) ~= TASK.kept_child then return end
  redis.call('DEL', run_key(base, task, string.sub(field, 3)))
  redis.call('HDEL', base .. 'task:' .. task, field)
end

-- The task has ended, so a run that failed before no longer waits for its child runs. `field` is any field of the task.
local function end_kept_child(base, task, field)
  if string.sub(field, 1, 2) ~= TASK.kept_child then return end
  if not forget_waits(base, task, string.sub(field, 3), {}) then drop_kept_child(base, task, field) end
end

-- Deletes the journals of child runs of an ended task that nobody can reopen any more.
local function drop_children(base, task)
  for _, field in ipairs(redis.call('HKEYS', base .. 'task:' .. task)) do drop_kept_child(base, task, field) end
end

-- Whether the task may have journals of child runs that wait for their requests.
local function keeps_children(flags)
  return string.find(flags, FLAG.reopened, 1, true) or string.find(flags, FLAG.inherited, 1, true)
end

-- A reopened run requests a child run again, or a fork one of its origin's. Returns whether the child has a journal of
-- the same request to resume.
local function take_child(base, task, run, name, digest)
  local key, field = base .. 'task:' .. task, TASK.kept_child .. run
  local kept = redis.call('HGET', key, field)
  if not kept then return false end
  redis.call('HDEL', key, field)
  if kept == digest or kept == '*' .. name or kept == '*' then return true end
  -- Another request: nobody continues the runs below it either.
  redis.call('DEL', run_key(base, task, run))
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if string.sub(name, 1, #field + 1) == field .. '/' then drop_kept_child(base, task, name) end
  end
  return false
end
