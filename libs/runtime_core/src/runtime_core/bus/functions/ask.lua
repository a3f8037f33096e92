-- Asks for something in the middle of a turn that goes on: for code that does not give way to a commit while it waits.
-- A repeat starts nothing twice: a step that has its result is answered at once, one that is missing changes hands.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 instance (`agent/key`) or '' · 6 now (epoch ms)
--      7 name of the reply stream (`reply:<name>`) that gets each result · 8 state in mid-run, '' unchanged
--      9 number of parts, then each part as `commit_turn` describes it: c, s and p
-- RETURNS {'OK', then step and journal value of each call that has its result already} · {'DONE'} where the turn is no
--         longer this entry's · {'FENCED'} · {'LIMIT', n} over max steps: in these three nothing was written
local function ask(keys, args)
  local base, task, run, inst = keys[1], args[3], args[4], args[5]
  local key, rk = base .. 'task:' .. task, run_key(base, task, run)
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return {'FENCED'} end
  local v = redis.call('HMGET', key, 'status', 'h', 'steps', 'fl')
  if redis.call('HGET', rk, 'cur') ~= args[2] or not v[1] or ENDED[v[1]] then return {'DONE'} end
  local at, asked = 10, 0
  for _ = 1, tonumber(args[9]) do
    local letter = args[at]
    local size = (letter == 'c' or letter == 's' or letter == 'p') and PART_SIZE[letter]
    if not size or not args[at + size - 1] then return redis.error_reply('ERR weft: malformed part ' .. tostring(letter)) end
    if letter == 'c' then check_call(base, args, at, task, run) else check_sent(base, args, at) end
    asked = asked + 1
    at = at + size
  end
  if inst ~= '' then check_instance(base, inst, (target_of(redis.call('HGET', rk, 'h')))) end
  check_record(base, task, v[4] or '')
  local limit = tonumber(string.match(v[2], '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n(%d*)') or '0') or 0
  if limit > 0 and tonumber(v[3] or '0') + asked > limit then return {'LIMIT', text(limit)} end

  local answers, flags, wait = {'OK'}, v[4] or '', '>' .. args[7]
  local reopened = string.find(flags, 'e', 1, true)
  if inst ~= '' and args[8] ~= '' then redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[8]) end
  -- Before the calls: one of them may come back to this instance, and must not wait for this turn.
  redis.call('HSET', rk, 'a', '1')
  at = 10
  for _ = 1, tonumber(args[9]) do
    local letter = args[at]
    local size = PART_SIZE[letter]
    local step = letter == 'c' and args[at + 2] or args[at + size - 2]
    local known = redis.call('HMGET', rk, 'j:' .. step, 'm:' .. step)
    if letter ~= 'c' then
      if not known[1] then
        send_part(base, args, at, task, run)
        redis.call('HSET', rk, 'j:' .. step, args[at + size - 1] .. 'K' .. args[6] .. 'null')
      end
    elseif known[1] then
      answers[#answers + 1] = step
      answers[#answers + 1] = known[1]
    elseif known[2] then
      redis.call('HSET', rk, 'm:' .. step, string.sub(known[2], 1, 9) .. wait)
    else
      local kind, failed, child, told = start_call(base, task, run, step, args[at + 1], args[at + 3], args[at + 4],
        args[at + 7], args[at + 8], args[6], reopened and args[at + 5])
      if child then flags = flag(flags, 'c') end
      if told then flags = flag(flags, 'o') end
      if kind then
        redis.call('HSET', rk, 'm:' .. step, args[at + 5] .. kind .. wait)
      else
        record_refused(base, task, flags, run .. '/' .. step, args[at + 1], args[at + 3], args[at + 4], args[at + 7],
          args[6], failed)
        redis.call('HINCRBY', key, 'steps', 1)
        local value = args[at + 5] .. 'E' .. args[6] .. failed
        redis.call('HSET', rk, 'j:' .. step, value)
        answers[#answers + 1] = step
        answers[#answers + 1] = value
      end
    end
    at = at + size
  end
  if flags ~= (v[4] or '') then redis.call('HSET', key, 'fl', flags) end
  -- This turn may wait now: a call back that came in before goes on top of it.
  if inst ~= '' and redis.call('LLEN', base .. 'nest:' .. inst) > 0 then
    local busy = redis.call('HGET', base .. 'inst:' .. inst, 'busy')
    if busy and top_of(busy) == task .. '|' .. run then start_nested(base, inst, busy) end
  end
  return answers
end
