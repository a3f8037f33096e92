-- Hooks that run when a task ends without completing. They run as a separate task.

-- The points of a task's hooks that still run when it has not completed.
local END_POINTS = {'post_task_call', 'task_failed', 'session_failed'}

-- The agent that runs the hooks of a task which ends without being completed, or nil if there are none: those that
-- its first run has chosen (`selection`, from the journal), and before it has begun those that its context names or
-- that always run. A task that answers a step of another one leaves them to that one.
local function agent_of_end(base, head, context, selection)
  if string.sub(head.to, 1, 1) == '@' then return nil end
  local found = redis.call('HGET', base .. 'end_hooks', head.agent)
  if not found then return nil end
  local agent, known, chosen = string.sub(found, 2), false, nil
  if selection and status_of(selection) == RESULT.ok then
    known, chosen = pcall(cjson.decode, payload_of(selection))
  elseif string.sub(found, 1, 1) == '!' then
    return agent
  elseif context then
    known, chosen = pcall(cjson.decode, context)
  end
  local hooks = known and type(chosen) == 'table' and chosen.hooks
  if type(hooks) ~= 'table' then return nil end
  for _, point in ipairs(END_POINTS) do
    if hooks[point] then return agent end
  end
  return nil
end

-- The data that `end_task` needs to start the hooks of the end; nothing is written here.
local function hooks_of_end(base, head, context, selection)
  local agent = agent_of_end(base, head, context, selection)
  if not agent then return nil end
  redis.call('XLEN', base .. head.stream)
  return {agent = agent, context = context or '', selection = selection and payload_of(selection) or 'null'}
end

-- The hooks of a task's end are a separate task, in the stream of the task's agent. A reopened task may end again: then
-- they run again.
local function start_hooks_of_end(base, task, ending, status, error, ms)
  local head, hooks = ending.head, ending.hooks
  local data = '{"task_id":' .. quote(task) .. ',"agent":' .. quote(head.agent) .. ',"key":' .. quote(head.key) ..
    ',"status":"' .. status .. '","error":' .. error .. ',"attempt":' .. (ending.attempt or '1') ..
    ',"selection":' .. hooks.selection .. '}'
  local own = string.sub(redis.sha1hex(task .. '\nended\n' .. ms), 1, 32)
  local entry = append_start(base, own, FIRST_RUN, head.stream, hooks.agent, '', data, hooks.context)
  store_task(base, own, head.stream, hooks.agent, '', data, hooks.context, task .. '/r', entry)
end
