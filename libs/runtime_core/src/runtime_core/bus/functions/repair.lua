local WAITED_FOR = {t = 'tool', a = 'agent', r = 'ray', s = 'spark', i = 'timers'}

-- Ends what nothing drives any more, because an entry was cut out of a stream by something that is not the bus.
-- Who asks has looked at streams and timers; what can be seen here is looked at again.
-- KEYS 1 base
-- ARGV 1 what: `run` (its `cur` is an entry, a retry or a wait that is no more) · `call` (a missing step that nothing
--      will answer) · `instance` (held by a run that is no more) · `mailbox` (events wait, and nobody holds it)
--      2 task · 3 run (for `call` the step's own: parent run + '/' + step) · 4 `run`: its `cur`; else `agent/key` or ''
--      5 now (epoch ms, 13 digits) · 6 error object (JSON)
-- RETURNS 'OK' · 'NO' where it is not so (any more): nothing was written
local function repair(keys, args)
  local base, what, task, run, ms, error = keys[1], args[1], args[2], args[3], args[5], args[6]
  if what == 'instance' then
    local busy = redis.call('HGET', base .. 'inst:' .. args[4], 'busy')
    if not busy or top_of(busy) ~= task .. '|' .. run then return 'NO' end
    if redis.call('HEXISTS', run_key(base, task, run), 'cur') == 1 then return 'NO' end
    release(base, args[4], task, run)
    return 'OK'
  end
  if what == 'mailbox' then
    if redis.call('LLEN', base .. 'mail:' .. args[4]) == 0 or redis.call('HEXISTS', base .. 'inst:' .. args[4], 'busy') == 1 then
      return 'NO'
    end
    redis.call('ZADD', base .. 'timers', 0, 'i|' .. args[4])
    return 'OK'
  end

  redis.call('XLEN', base .. 'dead')
  redis.call('XLEN', base .. 'record')
  local key = base .. 'task:' .. task
  local v = redis.call('HMGET', key, 'status', 'h', 'steps', 'fl')
  if not v[1] or ENDED[v[1]] then return 'NO' end
  local function keep(letter)
    for _, pair in ipairs({{'taskid', task}, {'runid', run}, {'attempt', '1'}, {'time', ms}, {'error', error},
      {'errors', '[' .. error .. ']'}, {'reason', 'lost'}}) do
      letter[#letter + 1] = pair[1]
      letter[#letter + 1] = pair[2]
    end
    local id = dead.keep(base, letter)
    redis.call('ZADD', base .. 'letters', ms_of(id), task .. '|' .. id)
  end

  if what == 'call' then
    local parent, step = parent_of(run)
    local missing = redis.call('HGET', run_key(base, task, parent), 'm:' .. step)
    if not missing then return 'NO' end
    keep({'stream', WAITED_FOR[string.sub(missing, 9, 9)] or '', 'name', step})
    redis.call('HSET', key, 'fl', flag(v[4] or '', 'l'))
    answer(base, task, parent, step, 'E', ms, error)
    return 'OK'
  end

  local rk = run_key(base, task, run)
  local r = redis.call('HMGET', rk, 'cur', 'h', 'u', 'd', 'x')
  if r[1] ~= args[4] or not r[2] then return 'NO' end
  if r[1] == 'queue' then
    -- It has never begun, and its hash has all that it needs: it starts now, past the others.
    if run ~= 'r' or QUEUE.holds(base, task, r[2]) then return 'NO' end
    QUEUE.leave(base, task, r[2])
    QUEUE.start(base, task)
    return 'OK'
  end
  local stream, agent, instance_key = target_of(r[2])
  if string.find(r[1], '-', 1, true) and redis.call('XRANGE', base .. stream, r[1], r[1])[1] then return 'NO' end
  local turn = r[3] or '0'
  local kind = turn == '0' and 'start' or 'resume'
  local letter = {'stream', stream, 'group', group_of(stream), 'entry', r[1], 'name', agent,
    'h', '1\n' .. kind .. '\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. instance_key .. '\n1\n' .. turn,
    'd', kind == 'start' and (r[4] or '') or ''}
  if r[5] then
    letter[#letter + 1] = 'x'
    letter[#letter + 1] = r[5]
  end
  keep(letter)
  if run == 'r' then
    end_task(base, task, check_end(base, task, v[2], v[4] or '', 'failed'), v[4] or '', 'failed', error, v[3] or '0', ms, '[]', true, false)
    return 'OK'
  end
  redis.call('HSET', key, 'fl', flag(v[4] or '', 'l'))
  record_unwritten(base, task, run, v[4] or '')
  end_child(base, task, run, instance_key ~= '' and (agent .. '/' .. instance_key) or '', 'E', ms, error)
  return 'OK'
end
