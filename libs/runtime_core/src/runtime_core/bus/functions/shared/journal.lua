-- Results of steps: a result is written once, and the last one that a run waits for resumes it.

-- Agents whose instances handle several events concurrently.
local function interleaves(base, agent) return redis.call('HEXISTS', base .. 'interleaved', agent) == 1 end

-- Whether a nested run is on top of the run among these holders of its instance: the run continues after that one.
local function is_below_in(base, agent, busy, ref)
  return busy and KEY.above(busy, ref) and not interleaves(base, agent)
end

local function is_below(base, agent, key, ref)
  if key == '' then return false end
  return is_below_in(base, agent, redis.call('HGET', base .. 'inst:' .. agent .. '/' .. key, INSTANCE.holders), ref)
end

-- Resumes the run, unless a nested run is in flight on its instance, which then wakes it at its end.
local function resume(base, task, run, stream, agent, key, turn, step, value)
  if is_below(base, agent, key, task .. '|' .. run) then return 'pend' end
  return append_resume(base, task, run, stream, agent, key, turn, step, value)
end

-- A nested run has changed the instance's state. The run below sees the change from the first step on whose result came
-- later, live and in replays. Its turn number increases, whether it is resumed now or later, so that no run in memory
-- matches it and it is replayed. The state is stored with that number, because a replay takes the steps in the order of
-- the program. All other results that the code has not seen yet get the number, too: a branch that waits for one of them
-- may come first in a replay. Returns the turn, and whether the state has changed.
local function keep_override(rk, key, turn, step, current)
  if key == '' then return turn, false end
  local v = redis.call('HMGET', rk, RUN.override, RUN.last_change)
  if not v[1] then
    if v[2] and current ~= 'held' then redis.call('HSET', rk, RUN.after_change .. step, v[2]) end
    return turn, false
  end
  local number = text(redis.call('HINCRBY', rk, RUN.turn, 1))
  redis.call('HSET', rk, RUN.override_from .. step, number .. ' ' .. v[1], RUN.last_change, number)
  redis.call('HDEL', rk, RUN.override)
  local unseen = redis.call('HGET', rk, RUN.unseen)
  for _, other in ipairs(unseen and lines(unseen) or {}) do
    redis.call('HSET', rk, RUN.after_change .. other, number)
  end
  return number, true
end

-- A result came for a run that continues when the nested run on its instance ends, perhaps with a changed state.
function KEY.note_unseen(rk, step)
  local unseen = redis.call('HGET', rk, RUN.unseen)
  redis.call('HSET', rk, RUN.unseen, unseen and unseen .. '\n' .. step or step)
end

-- A run that called in mid-turn is still in a process: its result goes to that process's reply stream. After a nested
-- run has changed the instance's state, the changed state goes with it.
local function tell_asker(base, rk, task, run, step, wait, value, changed)
  local fields = {REPLY.task, task .. '|' .. run .. '|' .. step, REPLY.data, value}
  if changed then
    fields[5], fields[6] = REPLY.state, redis.call('HGET', rk, RUN.override_from .. step)
  end
  -- A run that was reopened meanwhile counts none.
  if redis.call('HEXISTS', rk, RUN.open_asks) == 1 then redis.call('HINCRBY', rk, RUN.open_asks, -1) end
  -- pcall: a process whose stream another program has replaced finds the answer in the journal.
  redis.pcall('XADD', base .. 'reply:' .. string.sub(wait, 2), 'NOMKSTREAM', 'MAXLEN', '~', KEPT.replies, '*',
    unpack(fields))
end

-- Answers that are held back: step, status, time and JSON of each, in turn.
local function all_held_back(rk)
  local packed = redis.call('HGET', rk, RUN.held_back)
  return packed and cmsgpack.unpack(packed) or {}
end

-- With the answer, a run that called in mid-turn would continue while a nested run on its instance is in flight, and
-- one of their changes of the state would be lost. So it gets the answer when the nested run has ended.
local function hold_back(rk, step, status, ms, payload)
  local all = all_held_back(rk)
  local n = #all
  all[n + 1], all[n + 2], all[n + 3], all[n + 4] = step, status, ms, payload
  redis.call('HSET', rk, RUN.held_back, cmsgpack.pack(all))
end

-- Writes a step's result and, if that lets a branch of the run continue, appends one resume.
-- Returns false if the step is not missing (any more): nothing was written.
local function answer(base, task, run, step, status, ms, payload)
  local rk = run_key(base, task, run)
  local field = RUN.missing .. step
  local v = redis.call('HMGET', rk, field, RUN.current, RUN.header, RUN.turn)
  if not v[1] then return false end
  local wait = wait_of(v[1])
  local value = digest_of(v[1]) .. status .. ms .. payload
  local stream, agent, key = target_of(v[3])
  local to_process = string.sub(wait, 1, 1) == WAKES.by_reply
  if to_process and is_below(base, agent, key, task .. '|' .. run) then
    hold_back(rk, step, status, ms, payload)
    return true
  end
  redis.call('HDEL', rk, field)
  local turn, changed = keep_override(rk, key, v[4] or '0', step, v[2])
  if to_process then
    redis.call('HSET', rk, RUN.result .. step, value)
    tell_asker(base, rk, task, run, step, wait, value, changed)
    return true
  end
  if v[2] == 'held' then
    local ready = wait == WAKES.alone
    if not ready and wait ~= WAKES.never then ready = redis.call('HINCRBY', rk, wait, -1) <= 0 end
    if ready then
      local current = resume(base, task, run, stream, agent, key, turn, step, value)
      redis.call('HSET', rk, RUN.result .. step, value, RUN.current, current)
      if current == 'pend' then KEY.note_unseen(rk, step) end
      return true
    end
  end
  redis.call('HSET', rk, RUN.result .. step, value)
  if v[2] == 'pend' then KEY.note_unseen(rk, step) end
  return true
end

-- Gives the run the answers that were held back, since it is the newest in its instance now.
local function hand_out(base, task, run)
  local rk = run_key(base, task, run)
  local all = all_held_back(rk)
  if #all > 0 then redis.call('HDEL', rk, RUN.held_back) end
  for i = 1, #all, 4 do answer(base, task, run, all[i], all[i + 1], all[i + 2], all[i + 3]) end
end

-- Stores the span that gives a call, or a nested run, its result, if its step still lacks one.
local function note_answer(base, task, run, trace)
  local parent, step = parent_of(run)
  local rk = run_key(base, task, parent)
  if redis.call('HEXISTS', rk, RUN.missing .. step) == 1 then redis.call('HSET', rk, RUN.answered_by .. step, trace) end
end

-- The outcome of a call that may not be repeated, after its task has ended. A dead letter may pin the task: the journal
-- keeps the outcome, so that a reopened run does not begin the call again. The read checks the run's own key.
local function keep_late(base, task, run, status, ms, value)
  local parent, step = parent_of(run)
  local rk = run_key(base, task, parent)
  local missing = redis.call('HGET', rk, RUN.missing .. step)
  if not missing then return end
  redis.call('HDEL', rk, RUN.missing .. step)
  redis.call('HSET', rk, RUN.result .. step, digest_of(missing) .. status .. ms .. value)
end

-- Returns why a write in mid-turn does not count, or nil: 'FENCED' if its owner was declared dead, 'DONE'
-- if the turn is no longer this entry's or its task has ended.
local function turn_lost(base, owner, entry, current, status)
  if not redis.call('ZSCORE', base .. 'alive', owner) then return redis.status_reply('FENCED') end
  if current ~= entry then return redis.status_reply('DONE') end
  if not status or ENDED[status] then return redis.status_reply('DONE') end
  return nil
end

-- Whether the server has lost this step of the turn with its last writes. A later step in the journal without it would
-- belong to results that nobody has: a replay would take the earlier step again, and perhaps a different path.
local function lacks_earlier(run_hash, step)
  return step ~= '' and redis.call('HEXISTS', run_hash, RUN.result .. step) == 0
end

-- Journals a step in mid-turn. `unrecorded` is the run's field, `label` the step's kind, name and usage.
-- Returns false if the journal is full: nothing was written.
local function journal_step(run_hash, unrecorded, step, value, label, most)
  if redis.call('HLEN', run_hash) >= tonumber(most) then return false end
  redis.call('HSET', run_hash, RUN.result .. step, value, RUN.unrecorded, (unrecorded or '') .. step .. '\t' .. label ..
    '\n')
  return true
end

-- A branch that has emitted since the last commit has a line in `unrecorded`: its first step there, and this.
local function branch_mark(branch) return '\temit\t@' .. branch .. '\n' end

-- How far a branch's output is: the attempt (a text), the number of its pieces, and of those whose rows are recorded.
local function branch_output(stored)
  local attempt, count, recorded = string.match(stored or '', '^(%d+) (%d+) (%d+)')
  return attempt, tonumber(count or '0'), tonumber(recorded or '0')
end
