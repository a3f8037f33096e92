-- Puts a delivery back for later: it waits in the timers, and its instance stays busy.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run · 6 delay ms · 7 next attempt · 8 error (JSON) or ''
--      9 what the attempt has used (JSON) or '': a call's attempts are all counted
-- RETURNS 'OK' · 'DONE' · 'FENCED'
local function retry(keys, args)
  local base, stream, entry, task, run = keys[1], args[2], args[3], args[4], args[5]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local found = redis.call('XRANGE', base .. stream, entry, entry)[1]
  local is_turn = is_agent_stream(stream)
  local key = base .. 'task:' .. task
  local status = redis.call('HGET', key, 'status')
  local live = found and status and not ENDED[status]
  if live then
    if is_turn then
      live = redis.call('HGET', run_key(base, task, run), RUN.current) == entry
    else
      local parent, step = parent_of(run)
      live = redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 1
    end
  end
  if not live then
    local inst = ''
    if found and is_turn then
      local head = lines(found[2][2])
      if head[6] ~= '' then inst = head[5] .. '/' .. head[6] end
    end
    if inst ~= '' then check_instance(base, inst, stream) end
    settle_late(base, stream, entry, inst, task, run)
    -- The mark goes with the call, unless this is a late copy whose call goes on under another entry. pcall: a key of
    -- another type must not stop the acknowledgement.
    if found and not is_turn and redis.pcall('HDEL', base .. 'started', task .. '/' .. run) == 1 then
      keep_late(base, task, run, RESULT.error, text(now_ms(base)), error_json('UnknownOutcome',
        'the task ended while this call was running: find out whether it took effect'))
    end
    return 'DONE'
  end
  local fields, errors = found[2], nil
  local head = lines(fields[2])
  head[7] = args[7]
  local kept = {ENTRY.header, table.concat(head, '\n')}
  for i = 3, #fields, 2 do
    if fields[i] == ENTRY.errors then errors = fields[i + 1] else
      kept[#kept + 1] = fields[i]
      kept[#kept + 1] = fields[i + 1]
    end
  end
  if args[8] ~= '' then
    if errors then errors = string.sub(errors, 1, -2) .. ',' .. args[8] .. ']' else errors = '[' .. args[8] .. ']' end
  end
  if errors then
    kept[#kept + 1] = ENTRY.errors
    kept[#kept + 1] = dead.errors(errors)
  end
  local usage
  if args[9] and args[9] ~= '' then usage = cjson.encode(usage_with(redis.call('HGET', key, TASK.usage), {args[9]})) end
  local member = 'e|' .. stream .. '|' .. entry
  check_timers(base)
  settle(base, stream, entry)
  if usage then redis.call('HSET', key, TASK.usage, usage, TASK.flags, flag(redis.call('HGET', key, TASK.flags) or '', FLAG.usage)) end
  redis.call('HSET', base .. 'delayed', member, cmsgpack.pack(kept))
  add_timer(base, task, member, now_ms(base) + tonumber(args[6]))
  if is_turn then redis.call('HSET', run_key(base, task, run), RUN.current, 'retry') end
  return 'OK'
end
