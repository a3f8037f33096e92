-- Answers a question that has no answer yet, so that only the first of several answers (or the deadline) counts.
-- KEYS 1 base · ARGV 1 task · 2 request id (run ':' step '-' its random end) · 3 value (JSON) 
--      4 traceparent of the span that delivers it or ''
--      5 source and id of the answer's event, one line each, or ''
--      6 `fits` if the caller has checked the value against the question's schema, or nothing
-- RETURNS {'ok'} · {'ok', 'before'} if this very event has already answered it
--         · {'invalid', the problem} with the answer: the question stays open · {'unknown'} task · {'ended', status}
--         · {'schema', the question}: check the value, then call again with `fits`
--         · {'answered'} · {'no_request'}
local EXPECTS_VERDICT = '{"expects":"verdict",'
local HAS_SCHEMA = '{"schema":{'
local VERDICTS = {approve = true, deny = true, edit = true}
local VERDICT_FIELDS = {verdict = true, value = true, reason = true}

-- Returns the problem with an answer to a question that expects a verdict, or nil.
local function no_verdict(value)
  if value == 'true' or value == 'false' then return nil end
  local readable, found = pcall(cjson.decode, value)
  if not readable or type(found) ~= 'table' or not VERDICTS[found.verdict] then
    return 'is not a verdict: send true, false or {"verdict": "approve" | "deny" | "edit", "value", "reason"}'
  end
  for name in pairs(found) do
    if not VERDICT_FIELDS[name] then
      return 'has the unknown field ' .. tostring(name) .. '; choose from verdict, value, reason'
    end
  end
  if found.verdict == 'edit' and found.value == nil then
    return 'has the verdict edit and no value: send what it was edited to'
  end
  if found.reason ~= nil and type(found.reason) ~= 'string' then return 'has a reason that is not text' end
  return nil
end

-- The sender of an answer may not know that it counted. Its event is in the dedupe window of submits, which
-- outlives the question and the task. Keys of submits begin with a source, which is never empty.
local function key_of_answer(args) return seen_line('', args[1], args[2], args[5]) end

local function not_open(base, args, ...)
  if args[5] and args[5] ~= ''
    and redis.call('HGET', base .. 'seen', key_of_answer(args)) == redis.sha1hex(args[3]) then
    return {'ok', 'before'}
  end
  return {...}
end

-- Whether the id is the one shown with the question: an id derived from its place alone could be guessed.
local function is_id_of(question, id, place)
  local readable, shown = pcall(cjson.decode, data_of(question))
  return id == (readable and type(shown) == 'table' and shown.request_id or place)
end

local function signal(keys, args)
  local base, task = keys[1], args[1]
  -- Questions of older releases have ids without a random end.
  local place = string.match(args[2], '^(.*)%-%x+$') or args[2]
  local run, step = string.match(place, '^(.*):([^:]*)$')
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if not status then return not_open(base, args, 'unknown') end
  if not run then return {'no_request'} end
  local rk = run_key(base, task, run)
  local v = redis.call('HMGET', rk, RUN.missing .. step, RUN.question .. step)
  if ENDED[status] then return not_open(base, args, 'ended', status) end
  if not v[2] then return not_open(base, args, 'no_request') end
  if not is_id_of(v[2], args[2], run .. ':' .. step) then return not_open(base, args, 'no_request') end
  if not v[1] then return not_open(base, args, 'answered') end
  -- After the time comes the question as the client sees it, which begins with what it expects.
  if string.sub(v[2], 14, 13 + #EXPECTS_VERDICT) == EXPECTS_VERDICT then
    local wrong = no_verdict(args[3])
    if wrong then return {'invalid', wrong} end
  elseif string.sub(v[2], 14, 13 + #HAS_SCHEMA) == HAS_SCHEMA and args[6] ~= 'fits' then
    return {'schema', data_of(v[2])}
  end
  check_waiting(base, task, run)
  check_record(base, task, redis.call('HGET', base .. 'task:' .. task, TASK.flags))
  check_timers(base)
  redis.call('HLEN', base .. 'seen')
  redis.call('LLEN', base .. 'seen_order')
  redis.call('HLEN', base .. 'meta')
  local member = 's|' .. task .. '|' .. run .. '|' .. step
  if redis.call('ZREM', base .. 'timers', member) == 1 then
    redis.call('HDEL', base .. 'delayed', member)
    redis.call('HDEL', base .. 'task:' .. task, TASK.timer .. member)
  end
  if args[4] and args[4] ~= '' then note_answer(base, task, run .. '/' .. step, args[4]) end
  local now = text(now_ms(base))
  if answer(base, task, run, step, RESULT.ok, now, args[3]) then
    record_answer(base, task, run, step, asked_at(v[2]), now, RESULT.ok, args[3])
  end
  if args[5] and args[5] ~= '' then
    remember(base, key_of_answer(args), redis.sha1hex(args[3]), now, redis.call('HGET', base .. 'meta', 'dedupe_max'))
  end
  return {'ok'}
end
