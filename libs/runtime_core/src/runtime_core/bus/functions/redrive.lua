-- Takes a dead letter out and gives its delivery to the consumer that failed, with its attempts counted anew.
-- KEYS 1 base
-- ARGV 1 letter id · 2 '1' to reopen an ended task · 3 new data (JSON) or '' to send what was there
-- RETURNS {'ok', task} · {'missing'} · {'ended', task, status} · {'gone', task} where what waited for it is no more
local function redrive(keys, args)
  local base = keys[1]
  local found = redis.call('XRANGE', base .. 'dead', args[1], args[1])[1]
  if not found then return {'missing'} end
  local named = {}
  for i = 1, #found[2], 2 do named[found[2][i]] = found[2][i + 1] end
  if not named.h or not named.stream then return {'gone', ''} end
  local head = lines(named.h)
  local task, run, stream = head[3], head[4], named.stream
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', 'cur', 'fl')
  if not v[1] then return {'gone', task} end
  local ended, flags = ENDED[v[1]], v[3] or ''
  if ended and args[2] ~= '1' then return {'ended', task, v[1]} end
  local is_turn = string.sub(stream, 1, 5) == 'agent'
  local waiting, step = run, nil
  if not is_turn then waiting, step = parent_of(run) end
  local rk = run_key(base, task, waiting)
  local r = redis.call('HMGET', rk, 'cur', 'h', 'u')
  -- Without `cur` the journal went with the task's end: there is nothing to go on from.
  if not r[1] or not r[2] then return {'gone', task} end
  if is_turn and not ended and r[1] ~= 'park' then return {'gone', task} end
  head[7] = '1'
  -- A turn that no warm run has, and that no new run begins with: what the journal holds is not done again.
  if is_turn then head[8] = '-1' end
  local fields = {'h', table.concat(head, '\n')}
  for _, name in ipairs({'s', 'd', 'x'}) do
    if named[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = (name == 'd' and args[3] ~= '') and args[3] or named[name]
    end
  end
  local digest = '00000000'
  if not is_turn then
    -- A run that still goes on has its error and may have acted on it: it cannot be taken back.
    if not ended and r[1] ~= 'park' then return {'gone', task} end
    local journal = redis.call('HGET', rk, 'j:' .. step)
    if not journal then return {'gone', task} end
    if string.sub(journal, 9, 9) ~= 'E' then return {'gone', task} end
    digest = string.sub(journal, 1, 8)
  end
  redis.call('ZCARD', base .. 'letters')
  local now = text(now_ms(base))
  check_stream(base, stream)
  if is_turn and head[6] ~= '' then check_instance(base, head[5] .. '/' .. head[6]) end
  redis.call('ZCARD', base .. 'stopped')
  if ended then
    redis.call('HSET', key, 'status', 'running')
    redis.pcall('ZADD', base .. 'open', now, task)
    redis.call('HDEL', key, 'out', 'ended')
    redis.call('PERSIST', key)
    redis.call('ZREM', base .. 'stopped', task)
    flags = flag(flags, 'e')
    redis.call('HSET', key, 'fl', flags)
  end
  -- Attempts begin anew, so rows of what is done again take the places of those that were counted: the delivery's own
  -- (one that was parked has none), and for a call also that of the run whose end it was.
  local again = (is_turn and 0 or 1) + (ended and 1 or 0)
  local counted = tonumber(redis.call('HGET', key, 'steps') or '0')
  if again > 0 and counted >= again then redis.call('HSET', key, 'steps', text(counted - again)) end
  unpin(key, flags)
  redis.call('XDEL', base .. 'dead', args[1])
  redis.call('ZREM', base .. 'letters', task .. '|' .. args[1])
  if is_turn then
    if args[3] ~= '' and head[2] == 'start' then redis.call('HSET', rk, 'd', args[3]) end
    if head[6] ~= '' and ended then
      -- The instance may serve others by now: the run joins its line again.
      redis.call('HSET', rk, 'cur', deliver(base, task, run, stream, head[5], head[6], redis.call('HGET', rk, 'd'), named.x))
    else
      redis.call('HSET', rk, 'cur', redis.call('XADD', base .. stream, '*', unpack(fields)))
    end
  else
    redis.call('HDEL', rk, 'j:' .. step)
    redis.call('HSET', rk, 'm:' .. step, digest .. string.sub(stream, 1, 1) .. '!', 'cur', 'held')
    redis.call('XADD', base .. stream, '*', unpack(fields))
  end
  return {'ok', task}
end
