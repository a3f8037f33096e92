-- Starts a task that begins with results of another task: like `submit`, and writes its journal in the same step.
-- KEYS 1 base
-- ARGV 1 to 17 as those of `submit` · 18 origin (JSON: task, step) · 19 record (JSON: the row that names the origin)
--      20 start time of its run (epoch ms), or '' for now
--      21 … alternately a step and its journal value
-- RETURNS as `submit`
local function fork(keys, args)
  local base, task = keys[1], args[1]
  check_stream(base, 'record')
  local answer = submit(keys, args)
  if answer[1] ~= 'started' then return answer end
  local key = base .. 'task:' .. task
  local set = {'from', args[18], 'steps', '1'}
  local v = redis.call('HMGET', key, RUN.current, RUN.header)
  if args[20] ~= '' then
    set[#set + 1] = RUN.header
    set[#set + 1] = string.gsub(v[2], '^([^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n)%d*', '%1' .. args[20], 1)
  end
  if args[6] == '' and v[1] ~= 'queue' then
    -- A reader takes a start event without a key for a run without a past; a resume makes it load the journal.
    local stream, agent = target_of(v[2])
    redis.call('XDEL', base .. stream, v[1])
    set[#set + 1] = RUN.current
    set[#set + 1] = append_resume(base, task, FIRST_RUN, stream, agent, '', '-1', '', '')
  end
  for i = 21, #args, 2 do
    set[#set + 1] = RUN.result .. args[i]
    set[#set + 1] = args[i + 1]
  end
  set_fields(key, set)
  record_rows(base, task, redis.call('HGET', key, TASK.flags) or '', args[19])
  return answer
end
