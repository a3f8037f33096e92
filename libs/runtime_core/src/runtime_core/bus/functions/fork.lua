-- Starts a task that begins with results of another task: like `submit`, and writes its journal in the same step.
-- KEYS 1 base
-- ARGV 1 to 17 as those of `submit` · 18 origin (JSON: task, step) · 19 record (JSON: the row that names the origin)
--      20 start time of its run (epoch ms), or '' for now
--      21 … alternately a step and its journal value. `1/3` is step 3 of the child run that step 1 started; `1/` has
--        the name of that run's agent, or '' if it is unknown; `@<branch>` has the number of pieces that a branch has
--        emitted, which the fork does not emit again
-- RETURNS as `submit`

-- Stores the journals of child runs: each waits until the fork requests its run. Returns the task's flags.
local function keep_children(base, task, children, flags)
  for child, fields in pairs(children) do
    if #fields > 0 then set_fields(run_key(base, task, child), fields) end
    redis.call('HSET', base .. 'task:' .. task, TASK.kept_child .. child, '*' .. (fields.agent or ''))
    flags = flag(flags, FLAG.inherited)
  end
  redis.call('HSET', base .. 'task:' .. task, TASK.flags, flags)
  return flags
end

local function fork(keys, args)
  local base, task = keys[1], args[1]
  local own, children = {}, {}
  for i = 21, #args, 2 do
    local run, step = string.match(args[i], '^(.*)/([^/]*)$')
    local fields = own
    if run then
      local child = FIRST_RUN .. '/' .. run
      if not children[child] then
        children[child] = {}
        redis.call('HLEN', run_key(base, task, child))
      end
      fields = children[child]
    end
    local branch = string.match(step or args[i], '^@(.*)$')
    if step == '' then
      fields.agent = args[i + 1]
    elseif branch then
      fields[#fields + 1] = RUN.emitted .. branch
      -- No checksum: the pieces themselves are not known.
      fields[#fields + 1] = '1 ' .. args[i + 1] .. ' ' .. args[i + 1] .. ' - 0'
    else
      fields[#fields + 1] = RUN.result .. (step or args[i])
      fields[#fields + 1] = args[i + 1]
    end
  end
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
  set_fields(key, set)
  if #own > 0 then set_fields(key, own) end
  local flags = redis.call('HGET', key, TASK.flags) or ''
  if next(children) then flags = keep_children(base, task, children, flags) end
  record_rows(base, task, flags, args[19])
  return answer
end
