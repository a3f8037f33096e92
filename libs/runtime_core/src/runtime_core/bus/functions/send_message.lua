-- Sends a message to a running task. A step that waits for its name gets it at once; otherwise it is kept.
-- KEYS 1 base · ARGV 1 task · 2 name · 3 value (JSON) · 4 source and id of the message, one line each
-- RETURNS {'ok'} · {'ok', 'before'} if a message with this id was accepted before
--         · {'reused'}: its id was used for a different value · {'unknown'} task · {'ended', status}
--         · {'full', why}: nothing was written
local function send_message(keys, args)
  local base, task, name, value = keys[1], args[1], args[2], args[3]
  local key = base .. 'task:' .. task
  -- Keys of answers have the id of a question here, which is never a name: it has a colon.
  local sent = seen_line('', task, name, args[4])
  local before = redis.call('HGET', base .. 'seen', sent)
  if before then return before == redis.sha1hex(value) and {'ok', 'before'} or {'reused'} end
  local status, flags = unpack(redis.call('HMGET', key, 'status', TASK.flags))
  if not status then return {'unknown'} end
  if ENDED[status] then return {'ended', status} end
  redis.call('LLEN', base .. 'seen_order')
  redis.call('HLEN', base .. 'meta')
  local run, step, receivers = next_receiver(base, task, name)
  local now = text(now_ms(base))
  if run then
    check_waiting(base, task, run)
    check_record(base, task, flags)
    check_timers(base)
    table.remove(receivers, 1)
    table.remove(receivers, 1)
    put_list(key, TASK.receivers .. name, receivers)
    local member = 's|' .. task .. '|' .. run .. '|' .. step
    if redis.call('ZREM', base .. 'timers', member) == 1 then
      redis.call('HDEL', base .. 'delayed', member)
      redis.call('HDEL', key, TASK.timer .. member)
    end
    local asked = asked_at(redis.call('HGET', run_key(base, task, run), RUN.receives .. step))
    if answer(base, task, run, step, RESULT.ok, now, value) then
      record_answer(base, task, run, step, asked, now, RESULT.ok, value)
    end
  else
    local full = keep_message(base, task, name, value)
    if full then return {'full', full} end
  end
  remember(base, sent, redis.sha1hex(value), now, redis.call('HGET', base .. 'meta', 'dedupe_max'))
  return {'ok'}
end
