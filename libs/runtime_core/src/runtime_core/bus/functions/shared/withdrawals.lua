-- Withdrawals: steps whose results a run no longer wants, with everything that they have started. A path such as
-- `r/2.0.1` names a step and what it started: the call, or the child run.

-- Whether one of the paths is this path or above it.
local function is_within(paths, path)
  while path do
    if paths[path] then return true end
    path = parent_of(path)
  end
  return false
end

-- What the task has open within the paths: its child runs with their instances, the journals of failed ones, and timers.
local function open_within(base, task, flags, paths)
  local open = {children = {}, kept = {}, timers = {}}
  local has_children, has_timers = string.find(flags, FLAG.children, 1, true), string.find(flags, FLAG.timers, 1, true)
  if not has_children and not has_timers then return open end
  local key = base .. 'task:' .. task
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local child, prefix, rest = child_of(field), string.sub(field, 1, 2), string.sub(field, 3)
    if child and is_within(paths, child) then
      open.children[child] = redis.call('HGET', key, field)
    elseif prefix == TASK.kept_child and is_within(paths, rest) then
      open.kept[#open.kept + 1] = field
    elseif prefix == TASK.timer then
      local run, step = string.match(rest, '^s|[^|]*|([^|]*)|(.*)$')
      if run and is_within(paths, run .. '/' .. step) then open.timers[#open.timers + 1] = rest end
    end
  end
  return open
end

local function check_withdrawal(base, task, flags, open)
  redis.call('ZCARD', base .. 'stopped')
  redis.call('ZCARD', base .. 'requests')
  check_timers(base)
  if string.find(flags, FLAG.watched, 1, true) then check_stream(base, 'states') end
  for child, inst in pairs(open.children) do
    if string.sub(inst, 1, 1) == '@' then
      check_stream(base, 'asks')
    else
      local header = redis.call('HGET', run_key(base, task, child), RUN.header)
      if inst ~= '' then check_instance(base, inst, header and target_of(header)) end
    end
  end
end

-- The child run ends without a result. Its late commit, or its next owner, frees its instance if it is in flight.
local function withdraw_child(base, task, flags, child, inst)
  local key = base .. 'task:' .. task
  redis.call('HDEL', key, TASK.child .. child)
  if string.sub(inst, 1, 1) == '@' then
    local run, step = parent_of(child)
    redis.call('ZREM', base .. 'requests', task .. '|' .. run .. '|' .. step)
    return cancel_elsewhere(base, inst, task)
  end
  leave_line(base, task, child)
  free_child(base, task, child, inst)
  local held = string.find(flags, FLAG.reserved, 1, true) and redis.call('HGET', key, TASK.reserved)
  if held then give_back(key, held, child .. '|') end
  if string.find(flags, FLAG.watched, 1, true) then tell_state(base, 'run/' .. task .. '/' .. child, 'cancelled') end
end

-- Withdraws the steps at these paths. Running calls and runs learn of it from their heartbeats, and their commits only
-- settle their entries. `open` comes from `open_within`. Returns the rows that no commit will write, and their number.
local function withdraw(base, task, flags, paths, open)
  local rows, count = '', 0
  for child, inst in pairs(open.children) do
    if string.sub(inst, 1, 1) ~= '@' then
      local more, number = unwritten_rows(base, task, child,
        redis.call('HGET', run_key(base, task, child), RUN.unrecorded))
      if number > 0 then rows, count = rows .. (count > 0 and ',' or '') .. more, count + number end
    end
  end
  for path in pairs(paths) do
    local run, step = parent_of(path)
    redis.call('HDEL', run_key(base, task, run), RUN.missing .. step, RUN.question .. step, RUN.request .. step)
    stop_running(base, task .. '|' .. path)
  end
  for child, inst in pairs(open.children) do withdraw_child(base, task, flags, child, inst) end
  for _, field in ipairs(open.kept) do drop_kept_child(base, task, field) end
  for _, member in ipairs(open.timers) do
    redis.call('ZREM', base .. 'timers', member)
    redis.call('HDEL', base .. 'delayed', member)
    redis.call('HDEL', base .. 'task:' .. task, TASK.timer .. member)
  end
  for path in pairs(paths) do SLOT.free_flagged(base, flags, task, path, true) end
  return rows, count
end
