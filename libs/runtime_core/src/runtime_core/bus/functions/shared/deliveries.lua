-- Deliveries that failed: the end of one that does not count any more.

-- Settles a delivery that no longer counts. `error` is the outcome of a call that may not be repeated.
local function settle_unwanted(base, stream, entry, is_turn, instance, task, run, now, error)
  if instance ~= '' then check_instance(base, instance, stream) end
  settle_late(base, stream, entry, instance, task, run)
  -- pcall: a key of another type must not stop the acknowledgement.
  if not is_turn and redis.pcall('HDEL', base .. 'started', task .. '/' .. run) == 1 then
    keep_late(base, task, run, RESULT.error, now, error)
  end
end
