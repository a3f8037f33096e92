-- Deliveries that failed: whether one still counts, and the end of one that does not.

-- Returns whether a delivery still counts: a turn while its run is at `current`, a call while its step is missing.
local function is_wanted(base, current, is_turn, task, run, status)
  if not status or ENDED[status] then return false end
  if is_turn then return redis.call('HGET', run_key(base, task, run), RUN.current) == current end
  local parent, step = parent_of(run)
  return redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 1
end

-- Settles a delivery that no longer counts. `error` is the outcome of a call that may not be repeated.
local function settle_unwanted(base, stream, entry, is_turn, instance, task, run, now, error)
  if instance ~= '' then check_instance(base, instance, stream) end
  settle_late(base, stream, entry, instance, task, run)
  -- pcall: a key of another type must not stop the acknowledgement.
  if not is_turn and redis.pcall('HDEL', base .. 'started', task .. '/' .. run) == 1 then
    keep_late(base, task, run, RESULT.error, now, error)
  end
end
