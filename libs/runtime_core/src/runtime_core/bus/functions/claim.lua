-- A submit's source and id, and its task's id, each have one partition that says where the task is: the partition of the
-- id. Where the task lives elsewhere, `seen` holds in that partition a claim, and in the task's own a refusal where a
-- claim was given up:
--   <task>\n<digest>\n@<partition>:<token>   the submit starts, or has started, in that partition
--   <task>\n\n!<token>                       no submit with this token, or an older one, starts here
-- under `<source>\n<id>` for a submit, and `\n<task>` for a task id. A token is the server's time in microseconds.

local function id_field(field, task, source, id)
  return field == 'task_id' and '\n' .. task or source .. '\n' .. id
end

-- Remembers a line of the dedupe window: the newest `most` of the last 24 hours (the housekeeper forgets older ones).
local function remember(base, field, value, created, most)
  redis.call('HSET', base .. 'seen', field, value)
  if redis.call('RPUSH', base .. 'seenq', created .. '\n' .. field) > tonumber(most or '1000000') then
    for _, old in ipairs(redis.call('LPOP', base .. 'seenq', 2)) do
      redis.call('HDEL', base .. 'seen', string.match(old, '^%d+\n(.*)$'))
    end
  end
end

local function used_before(field, task, source, id)
  if field == 'task_id' then return {'rejected', field, 'a task ' .. task .. ' with other content exists'} end
  return {'rejected', field, 'the id ' .. id .. ' of source ' .. source .. ' was used before with other content'}
end

-- Partition, digest and token of what holds an id: a claim, a task of this partition (without a token), or what an older
-- release has noted (without a digest, token 0).
local function holder_of(base, field, line, task)
  local here = string.match(base, '{(%d+)}:$')
  local found = redis.call('HGET', base .. 'seen', line)
  if found then
    local first = lines(found)
    local place, token = string.match(first[3] or '', '^@(%d+):(%d+)$')
    if place then return place, first[2], token end
    if string.sub(first[3] or '', 1, 1) ~= '!' then return here, first[2], '' end
  end
  if field == 'task_id' then
    local h = redis.call('HGET', base .. 'task:' .. task, 'h')
    if h then return here, lines(h)[9], '' end
    local place = redis.call('HGET', base .. 'places', task)
    if place and place ~= here then return place, nil, '0' end
  end
  return nil
end

-- What a claim or a refusal in `seen` says of a submit with this digest and token; nil where it may start.
local function misplaced(field, mark, digest, wanted, token)
  local place, of_claim = string.match(mark, '^@(%d+):(%d+)$')
  if place then return {digest == wanted and 'elsewhere' or 'taken', field, place, of_claim} end
  local refused = string.match(mark, '^!(%d+)$')
  if refused and tonumber(token == '' and '0' or token) <= tonumber(refused) then return {'again', field} end
  return nil
end

-- Claims ids for a submit whose task is to start in another partition: all of them, or none.
-- KEYS 1 base
-- ARGV 1 task · 2 source · 3 event id · 4 digest · 5 partition of the task · 6 … the ids: `task_id`, `id`
-- RETURNS {'ok', a token for each id} · {'elsewhere', field, partition, token} where an equal submit has claimed the id for
--         another partition · {'taken', field, partition, token} where one with other content has, which may not have
--         started · {'rejected', field, message}
local function claim(keys, args)
  local base, task, source, id, digest, wanted = keys[1], args[1], args[2], args[3], args[4], args[5]
  local answer, fresh, here = {'ok'}, {}, string.match(base, '{(%d+)}:$')
  for i = 6, #args do
    local field, line = args[i], id_field(args[i], task, source, id)
    if field == 'task_id' and redis.call('ZSCORE', base .. 'stopped', 'tomb:' .. task) then
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
  redis.call('LLEN', base .. 'seenq')
  redis.call('HLEN', base .. 'places')
  local most = redis.call('HGET', base .. 'meta', 'dedupe_max')
  local t = redis.call('TIME')
  local token = text(tonumber(t[1]) * 1000000 + tonumber(t[2]))
  for _, line in ipairs(fresh) do
    remember(base, line, task .. '\n' .. digest .. '\n@' .. wanted .. ':' .. token, string.sub(token, 1, -4), most)
  end
  for i = 6, #args do
    if args[i] == 'task_id' then redis.call('HSET', base .. 'places', task, wanted) end
    if answer[i - 4] == '' then answer[i - 4] = token end
  end
  return answer
end
