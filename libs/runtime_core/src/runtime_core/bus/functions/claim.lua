local function used_before(field, task, source, id)
  if field == 'task_id' then return {'rejected', field, 'a task ' .. task .. ' with different content exists'} end
  return {'rejected', field, 'the id ' .. id .. ' of source ' .. source .. ' was used before with different content'}
end

-- Claims ids for a submit whose task starts in another partition: all of them, or none.
-- KEYS 1 base
-- ARGV 1 task · 2 source · 3 event id · 4 digest · 5 partition of the task · 6 … the ids: `task_id`, `id`
-- RETURNS {'ok', a token for each id}
--         {'elsewhere', field, partition, token} if an equal submit has claimed the id for another partition
--         {'taken', field, partition, token} if a submit with different content has claimed it, and may not have started
--         {'rejected', field, message}
local function claim(keys, args)
  local base, task, source, id, digest, wanted = keys[1], args[1], args[2], args[3], args[4], args[5]
  local answer, fresh, here = {'ok'}, {}, string.match(base, '{(%d+)}:$')
  for i = 6, #args do
    local field, line = args[i], id_field(args[i], task, source, id)
    if field == 'task_id' and QUEUE.was_cancelled(base, task) then
      return {'rejected', 'task_id', 'the task ' .. task .. ' was cancelled before it was submitted'}
    end
    local place, of, token = holder_of(base, field, line, task)
    if place and of ~= digest then
      if place == here then return used_before(field, task, source, id) end
      return {'taken', field, place, token}
    end
    if place and place ~= wanted then return {'elsewhere', field, place, token} end
    if not place then fresh[#fresh + 1] = line end
    answer[#answer + 1] = token or ''
  end
  redis.call('LLEN', base .. 'seen_order')
  redis.call('HLEN', base .. 'places')
  local most = redis.call('HGET', base .. 'meta', 'dedupe_max')
  local seconds, micros = unpack(redis.call('TIME'))
  local token = text(tonumber(seconds) * 1000000 + tonumber(micros))
  for _, line in ipairs(fresh) do
    remember(base, line, task .. '\n' .. digest .. '\n@' .. wanted .. ':' .. token, string.sub(token, 1, -4), most)
  end
  for i = 6, #args do
    if args[i] == 'task_id' then redis.call('HSET', base .. 'places', task, wanted) end
    if answer[i - 4] == '' then answer[i - 4] = token end
  end
  return answer
end
