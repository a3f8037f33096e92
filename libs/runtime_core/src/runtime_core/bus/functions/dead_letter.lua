-- Ends a delivery that will not be retried: keeps it with its reason, answers the waiting step or ends the task, and
-- releases the instance, in one step, even if the handler never ran.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 reason (`attempts_used_up`, `not_retryable`, `poison`, `diverged`, `malformed`, …)
--      5 errors of this delivery (JSON array) · 6 now (epoch ms)
--      7 error object (JSON) for the waiting step or the task
--      8 record (JSON steps: the delivery's own, then those that its turn has finished) or '' · 9 steps in the record
--      10 usage (JSON) or ''
-- RETURNS 'OK' · 'DONE' · 'FENCED'

-- The letter of a delivery: `named` are its fields by name, `head` the lines of its header, empty for another's entry.
local function letter_of(args, fields, named, head)
  local stream = args[2]
  local letter = {'rows', args[9], 'reason', args[4], 'stream', stream, 'group', group_of(stream), 'entry', args[3],
    'time', args[6], 'error', args[7]}
  local errors, before = args[5], named[ENTRY.errors]
  if before then errors = string.sub(before, 1, -2) .. (errors == '[]' and ']' or ',' .. string.sub(errors, 2)) end
  letter[#letter + 1] = 'errors'
  letter[#letter + 1] = errors
  for i = 1, #fields, 2 do
    if fields[i] ~= ENTRY.errors then
      letter[#letter + 1] = fields[i]
      letter[#letter + 1] = fields[i + 1]
    end
  end
  if not head then return letter end
  for _, pair in ipairs({{'taskid', head[3]}, {'runid', head[4]}, {'name', head[5]}, {'attempt', head[7]}}) do
    letter[#letter + 1] = pair[1]
    letter[#letter + 1] = pair[2]
  end
  return letter
end

-- Reads every key that the end of a run or a call is about to write. Returns what `end_task` needs, if the task ends.
local function check_burial(base, args, ends_task, head, header, flags, inst)
  local task = head[3]
  if ends_task then
    local ending = check_end(base, task, header, flags, 'failed')
    ending.attempt = head[7]
    ending.row = tonumber(args[9]) > 0
    return ending
  end
  check_record(base, task, flags)
  check_waiting(base, task, (parent_of(head[4])))
  if inst ~= '' then check_instance(base, inst, args[2]) end
  return nil
end

-- Writes the dead letter, which pins the task.
local function keep_pinning(base, task, key, letter)
  local letter_id = dead.keep(base, letter)
  redis.call('ZADD', base .. 'letters', letter_id and ms_of(letter_id) or 0, task .. '|' .. letter_id)
  redis.call('HINCRBY', key, TASK.letters, 1)
end

-- Answers the step that waits for the run or the call.
local function answer_step(base, args, is_turn, task, run, inst, flags, steps)
  local parent, step = parent_of(run)
  flags = flag(flags, FLAG.letters)
  redis.call('HSET', base .. 'task:' .. task, 'steps', steps, TASK.flags, flags)
  if args[8] ~= '' then record_rows(base, task, flags, args[8]) end
  if is_turn then
    record_unwritten(base, task, run, flags)
    end_child(base, task, run, inst, RESULT.error, args[6], args[7])
  else
    answer(base, task, parent, step, RESULT.error, args[6], args[7])
    SLOT.free_flagged(base, flags, task, run)
  end
end

-- Ends a delivery that counts. `v` has the task's status, header, steps and flags.
local function bury(base, args, is_turn, head, inst, v, letter)
  local stream, entry, reason, task, run = args[2], args[3], args[4], head[3], head[4]
  local key, flags, usage = base .. 'task:' .. task, v[4] or '', nil
  if args[10] and args[10] ~= '' then
    usage = cjson.encode(usage_with(redis.call('HGET', key, TASK.usage), {args[10]}))
    flags = flag(flags, FLAG.usage)
  end
  local ends_task = is_turn and run == FIRST_RUN
  local ending = check_burial(base, args, ends_task, head, v[2], flags, inst)

  settle(base, stream, entry)
  -- A redrive of the letter implies that the call may be repeated.
  if not is_turn then redis.pcall('HDEL', base .. 'started', task .. '/' .. run) end
  -- An owner whose turn failed has put the rows of its steps into the record; an owner that only gives up knows none.
  if is_turn and reason ~= 'diverged' and tonumber(args[9]) > 1 then
    redis.call('HDEL', run_key(base, task, run), RUN.unrecorded)
    if ending then ending.unwritten = nil end
  end
  keep_pinning(base, task, key, letter)
  if usage then redis.call('HSET', key, TASK.usage, usage, TASK.flags, flags) end
  local steps = text(tonumber(v[3] or '0') + tonumber(args[9]))
  if reason == 'diverged' then
    -- The code, not the run, is wrong: the run stays as it is until a rollback or a fix and a redrive.
    redis.call('HSET', run_key(base, task, run), RUN.current, 'park')
  elseif ends_task then
    end_task(base, task, ending, flags, 'failed', args[7], steps, args[6], args[8], true, false)
  else
    answer_step(base, args, is_turn, task, run, inst, flags, steps)
  end
  return 'OK'
end

local function dead_letter(keys, args)
  local base, stream, entry = keys[1], args[2], args[3]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  redis.call('XLEN', base .. 'dead')
  redis.call('XLEN', base .. 'record')
  redis.call('ZCARD', base .. 'letters')
  local found = redis.call('XRANGE', base .. stream, entry, entry)[1]
  if not found then
    settle(base, stream, entry)
    return 'DONE'
  end
  local fields, named = found[2], {}
  for i = 1, #fields, 2 do named[fields[i]] = fields[i + 1] end
  local head, is_turn = lines(named[ENTRY.header] or ''), is_agent_stream(stream)
  if head[1] ~= '1' or not head[7] or head[3] == '' or not (is_turn or parent_of(head[4])) then
    settle(base, stream, entry)
    dead.keep(base, letter_of(args, fields, named, nil))
    return 'OK'
  end
  local task, run, letter = head[3], head[4], letter_of(args, fields, named, head)
  local inst = (is_turn and head[6] ~= '') and (head[5] .. '/' .. head[6]) or ''
  local v = redis.call('HMGET', base .. 'task:' .. task, 'status', RUN.header, 'steps', TASK.flags)
  if not QUEUE.is_wanted(base, entry, is_turn, task, run, v[1]) then
    settle_unwanted(base, stream, entry, is_turn, inst, task, run, args[6], args[7])
    if args[4] ~= 'malformed' then return 'DONE' end
    -- The bus never sent it, so no commit can have handled it before.
    dead.keep(base, letter)
    return 'OK'
  end
  return bury(base, args, is_turn, head, inst, v, letter)
end
