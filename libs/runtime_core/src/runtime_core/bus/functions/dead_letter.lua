-- Ends a delivery that will not be tried again: keeps it with its reason, answers the waiting step or ends the
-- task, and releases the instance, in one step, since whoever calls it may never have run the handler.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 reason (`attempts`, `not_retryable`, `poison`, `diverged`, `malformed`, …)
--      5 errors of this delivery (JSON array) · 6 now (epoch ms) · 7 error object (JSON) for the waiting step or the task
--      8 record (JSON steps: the delivery's own, then those that its turn has finished) or '' · 9 steps in the record
--      10 what it has used (JSON) or ''
-- RETURNS 'OK' · 'DONE' · 'FENCED'
local function dead_letter(keys, args)
  local base, stream, entry, reason = keys[1], args[2], args[3], args[4]
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
  local head = lines(named.h or '')
  local letter = {'rows', args[9], 'reason', reason, 'stream', stream, 'group', group_of(stream), 'entry', entry, 'time', args[6], 'error', args[7]}
  local errors = args[5]
  if named.e then errors = string.sub(named.e, 1, -2) .. (errors == '[]' and ']' or ',' .. string.sub(errors, 2)) end
  letter[#letter + 1] = 'errors'
  letter[#letter + 1] = errors
  for i = 1, #fields, 2 do
    if fields[i] ~= 'e' then
      letter[#letter + 1] = fields[i]
      letter[#letter + 1] = fields[i + 1]
    end
  end
  local is_turn = string.sub(stream, 1, 5) == 'agent'
  if head[1] ~= '1' or not head[7] or head[3] == '' or not (is_turn or parent_of(head[4])) then
    settle(base, stream, entry)
    dead.keep(base, letter)
    return 'OK'
  end
  local task, run, name, instance_key = head[3], head[4], head[5], head[6]
  for _, pair in ipairs({{'taskid', task}, {'runid', run}, {'name', name}, {'attempt', head[7]}}) do
    letter[#letter + 1] = pair[1]
    letter[#letter + 1] = pair[2]
  end
  local inst = (is_turn and instance_key ~= '') and (name .. '/' .. instance_key) or ''
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', 'h', 'steps', 'fl')
  local parent, step = parent_of(run)
  local live = v[1] and not ENDED[v[1]]
  if live then
    if is_turn then
      live = redis.call('HGET', run_key(base, task, run), 'cur') == entry
    else
      live = redis.call('HEXISTS', run_key(base, task, parent), 'm:' .. step) == 1
    end
  end
  if not live then
    if inst ~= '' then check_instance(base, inst, stream) end
    settle_late(base, stream, entry, inst, task, run)
    if not is_turn and redis.pcall('HDEL', base .. 'started', task .. '/' .. run) == 1 then
      keep_late(base, task, run, 'E', args[6], args[7])
    end
    if reason ~= 'malformed' then return 'DONE' end
    -- The bus never sent it, so no commit can have handled it before.
    dead.keep(base, letter)
    return 'OK'
  end
  local ending, usage
  local flags = v[4] or ''
  if args[10] and args[10] ~= '' then
    usage = cjson.encode(usage_with(redis.call('HGET', key, 'us'), {args[10]}))
    flags = flag(flags, 'u')
  end
  if is_turn and run == 'r' then
    ending = check_end(base, task, v[2], flags, 'failed')
    ending.attempt = head[7]
    ending.row = tonumber(args[9]) > 0
  else
    check_record(base, task, flags)
    check_waiting(base, task, parent)
    if inst ~= '' then check_instance(base, inst, stream) end
  end
  settle(base, stream, entry)
  -- Whoever drives the letter again has decided that the call may be repeated.
  if not is_turn then redis.pcall('HDEL', base .. 'started', task .. '/' .. run) end
  -- Whoever failed in this turn has put the rows of its steps into the record; whoever only buries it knows none.
  if is_turn and reason ~= 'diverged' and tonumber(args[9]) > 1 then
    redis.call('HDEL', run_key(base, task, run), 'w')
    if ending then ending.unwritten = nil end
  end
  local letter_id = dead.keep(base, letter)
  redis.call('ZADD', base .. 'letters', letter_id and ms_of(letter_id) or 0, task .. '|' .. letter_id)
  redis.call('HINCRBY', key, 'lt', 1)
  if usage then redis.call('HSET', key, 'us', usage, 'fl', flags) end
  local steps = text(tonumber(v[3] or '0') + tonumber(args[9]))
  if reason == 'diverged' then
    -- The code, not the run, is wrong: it stays as it is until a rollback or a fix and a redrive.
    redis.call('HSET', run_key(base, task, run), 'cur', 'park')
    return 'OK'
  end
  if is_turn and run == 'r' then
    end_task(base, task, ending, flags, 'failed', args[7], steps, args[6], args[8], true, false)
    return 'OK'
  end
  flags = flag(flags, 'l')
  if not is_turn and parent == 'r' then flags = flag(flags, 'k') end
  redis.call('HSET', key, 'steps', steps, 'fl', flags)
  if args[8] ~= '' then record_rows(base, task, flags, args[8]) end
  if is_turn then
    record_unwritten(base, task, run, flags)
    end_child(base, task, run, inst, 'E', args[6], args[7])
  else
    answer(base, task, parent, step, 'E', args[6], args[7])
  end
  return 'OK'
end
