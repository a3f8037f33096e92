local WAITED_FOR = {t = 'tool', a = 'agent', r = 'ray', s = 'spark', i = 'timers'}

-- Frees an instance that a lost run holds.
local function repair_instance(base, inst, task, run)
  local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
  if not busy or top_of(busy) ~= task .. '|' .. run then return 'NO' end
  if redis.call('HEXISTS', run_key(base, task, run), RUN.current) == 1 then return 'NO' end
  release(base, inst, task, run)
  return 'OK'
end

-- Continues a mailbox with events whose instance has no holder.
local function repair_mailbox(base, inst)
  if redis.call('LLEN', base .. 'mail:' .. inst) == 0 then return 'NO' end
  if redis.call('HEXISTS', base .. 'inst:' .. inst, INSTANCE.holders) == 1 then return 'NO' end
  redis.call('ZADD', base .. 'timers', 0, 'i|' .. inst)
  return 'OK'
end

-- Frees the slots of a limit whose work has ended.
local function repair_slot(base, limit, task, path)
  if SLOT.lives(base, task .. '|' .. path) then return 'NO' end
  SLOT.look_after(base, limit)
  return 'OK'
end

-- Keeps a dead letter, which pins the task.
local function keep_lost(base, args, letter)
  local task, error = args[2], args[6]
  for _, pair in ipairs({{'taskid', task}, {'runid', args[3]}, {'attempt', '1'}, {'time', args[5]}, {'error', error},
    {'errors', '[' .. error .. ']'}, {'reason', 'lost'}}) do
    letter[#letter + 1] = pair[1]
    letter[#letter + 1] = pair[2]
  end
  local id = dead.keep(base, letter)
  redis.call('ZADD', base .. 'letters', ms_of(id), task .. '|' .. id)
end

-- Ends a missing step that nothing will answer.
local function repair_call(base, args, key, flags)
  local task, parent, step = args[2], parent_of(args[3])
  local missing = redis.call('HGET', run_key(base, task, parent), RUN.missing .. step)
  if not missing then return 'NO' end
  keep_lost(base, args, {'stream', WAITED_FOR[kind_of(missing)] or '', 'name', step})
  redis.call('HSET', key, TASK.flags, flag(flags, FLAG.letters))
  answer(base, task, parent, step, RESULT.error, args[5], args[6])
  SLOT.free_flagged(base, flags, task, args[3])
  return 'OK'
end

-- Writes the letter of a run whose entry is gone. `r` has its current, header, turn, input and context.
local function letter_of_run(task, run, r)
  local stream, agent, instance_key = target_of(r[2])
  local turn = r[3] or '0'
  local kind = turn == '0' and 'start' or 'resume'
  local letter = {'stream', stream, 'group', group_of(stream), 'entry', r[1], 'name', agent,
    ENTRY.header,
    '1\n' .. kind .. '\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. instance_key .. '\n1\n' .. turn,
    ENTRY.data, kind == 'start' and (r[4] or '') or ''}
  if r[5] then
    letter[#letter + 1] = ENTRY.context
    letter[#letter + 1] = r[5]
  end
  return letter
end

-- Starts a task that waits for its tenant's turn but is missing from the queue. Its hash has everything that a start
-- needs, so it starts now, ahead of the others.
local function repair_queued(base, task, run, header)
  if run ~= FIRST_RUN or QUEUE.holds(base, task, header) then return 'NO' end
  QUEUE.leave(base, task, header)
  QUEUE.start(base, task)
  return 'OK'
end

-- Ends a run whose `current` is gone. `v` has its task's status, header, steps and flags.
local function repair_run(base, args, key, v)
  local task, run, ms, error = args[2], args[3], args[5], args[6]
  local r = redis.call('HMGET', run_key(base, task, run), RUN.current, RUN.header, RUN.turn, RUN.input, RUN.context)
  if r[1] ~= args[4] or not r[2] then return 'NO' end
  if r[1] == 'queue' then return repair_queued(base, task, run, r[2]) end
  local stream, agent, instance_key = target_of(r[2])
  if in_flight(r[1]) and redis.call('XRANGE', base .. stream, r[1], r[1])[1] then return 'NO' end
  keep_lost(base, args, letter_of_run(task, run, r))
  local flags = v[4] or ''
  if run == FIRST_RUN then
    local ending = check_end(base, task, v[2], flags, 'failed')
    end_task(base, task, ending, flags, 'failed', error, v[3] or '0', ms, '[]', true, false)
    return 'OK'
  end
  redis.call('HSET', key, TASK.flags, flag(flags, FLAG.letters))
  record_unwritten(base, task, run, flags)
  end_child(base, task, run, instance_key ~= '' and (agent .. '/' .. instance_key) or '', RESULT.error, ms, error)
  return 'OK'
end

-- Ends a run or a call that nothing can continue any more, because something other than the bus deleted an entry of a
-- stream. The caller has checked streams and timers; the function checks again what it can.
-- KEYS 1 base
-- ARGV 1 what: `run` (its `cur` is an entry, a retry or a wait that is gone) · `call` (a missing step that nothing
--      will answer) · `instance` (held by a run that is gone) · `mailbox` (events wait, and nobody holds it)
--      · `slot` (of a limit, held by work that has ended)
--      2 task · 3 run (for `call` the step's own: parent run + '/' + step) · 4 `run`: its `cur`; `slot`: the limit; else `agent/key` or ''
--      5 now (epoch ms, 13 digits) · 6 error object (JSON)
-- RETURNS 'OK' · 'NO' if this is not the case, or no longer: nothing was written
local function repair(keys, args)
  local base, what, task, run = keys[1], args[1], args[2], args[3]
  if what == 'instance' then return repair_instance(base, args[4], task, run) end
  if what == 'mailbox' then return repair_mailbox(base, args[4]) end
  if what == 'slot' then return repair_slot(base, args[4], task, run) end
  redis.call('XLEN', base .. 'dead')
  redis.call('XLEN', base .. 'record')
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags)
  if not v[1] or ENDED[v[1]] then return 'NO' end
  if what == 'call' then return repair_call(base, args, key, v[4] or '') end
  return repair_run(base, args, key, v)
end
