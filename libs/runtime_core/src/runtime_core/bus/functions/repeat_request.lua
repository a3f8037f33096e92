-- Repeats a request that another partition has forgotten. The task there has the same id, so a repeat starts nothing
-- twice.
-- KEYS 1 base · ARGV 1 member (`task|run|step`)
-- RETURNS 'OK' · 'QUEUED' if the relay has not carried the request yet · 'DONE' if nobody waits for it any more
local function repeat_request(keys, args)
  local base, member = keys[1], args[1]
  local task, run, step = string.match(member, '^(.-)|(.-)|(.*)$')
  local request = waiting_request(base, task, run, step)
  if not request then return 'DONE' end
  if redis.call('XRANGE', base .. 'asks', request[8], request[8])[1] then return 'QUEUED' end
  request[8] = ask_elsewhere(base, request[1], request[2], request[3], request[4], request[5], member)
  redis.call('HSET', run_key(base, task, run), RUN.request .. step, cmsgpack.pack(request))
  return 'OK'
end
