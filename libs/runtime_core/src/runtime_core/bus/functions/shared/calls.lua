-- Calls: a step that calls an agent, a tool or an engine.

-- The stream of an agent or a tool that another app declares.
local function stream_by_manifest(base, target, name)
  return redis.call('HGET', base .. string.sub(target, 2) .. 's', name)
end

-- Starts what a step calls. Returns the call's kind, or nil and the error (JSON) that answers the step at once; whether
-- the task has a child run by it; whether something was written to the task's output; and whether the call waits for its
-- tenant's turn, with a timer. `caller` is that of `QUEUE.append`. `digest` is the step's if the task `keeps_children`,
-- else nil: a child run of the same request continues from its journal.
local function start_call(base, task, run, step, target, name, call_key, data, context, ms, caller, digest)
  local kind = string.sub(target, 1, 1)
  local child = run .. '/' .. step
  if kind == '@' then
    local place, limit = string.match(target, '^(@%d+:[^:]*):?(%d*)$')
    open_request(base, task, run, step, place, name, call_key, data, context, limit)
    redis.call('HSET', base .. 'task:' .. task, TASK.child .. child, place)
    return KIND.agent, nil, true
  end
  if kind == '?' then
    local wanted = target
    kind, target = string.sub(target, 2, 2), stream_by_manifest(base, target, name)
    if not target then
      return nil, error_json('UnknownName', 'no ' .. string.sub(wanted, 2) .. ' is named ' .. name), false
    end
  end
  if kind == KIND.agent then
    local kept = digest and take_child(base, task, child, name, digest)
    local cur, refused = deliver(base, task, child, target, name, call_key, data, context, caller, kept and '-1')
    if not cur then
      if kept then redis.call('DEL', run_key(base, task, child)) end
      return nil, refused, false
    end
    redis.call('HSET', run_key(base, task, child), RUN.current, cur, RUN.header,
      target .. '\n' .. name .. '\n' .. call_key .. '\n\n' ..
      (in_flight(cur) and ms_of(cur) or ms) .. '\n0', RUN.input, data, RUN.context, context)
    redis.call('HSET', base .. 'task:' .. task, TASK.child .. child, call_key ~= '' and (name .. '/' .. call_key) or '')
    return kind, nil, true, false, cur == 'retry'
  end
  local header = '1\ncall\n' .. task .. '\n' .. child .. '\n' .. name .. '\n' .. call_key .. '\n1\n0'
  if kind == KIND.ray or kind == KIND.spark then
    local failed, told = start_engine_step(base, task, child, target, header, data, context)
    if failed then return nil, failed, false end
    return kind, nil, false, told
  end
  local fields = {ENTRY.header, header, ENTRY.data, data}
  if context ~= '' then fields[5], fields[6] = ENTRY.context, context end
  return kind, nil, false, false, QUEUE.append(base, target, caller, fields) == 'retry'
end
