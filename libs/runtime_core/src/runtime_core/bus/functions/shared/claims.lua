-- A submit's source and id, and its task's id, each belong to one partition, which says where the task is. If the task
-- lives in another partition, `seen` holds a claim in the id's partition, and in the task's partition a refusal if a
-- claim was given up:
--   <task>\n<digest>\n@<partition>:<token>   the submit starts, or has started, in that partition
--   <task>\n\n!<token>                       no submit with this token, or an older one, starts here
-- under `<source>\n<id>` for a submit, and `\n<task>` for a task id (`seen_line` in ids.lua). A token is the server's
-- time in microseconds.

local function id_field(field, task, source, id)
  if field == 'task_id' then return seen_line('', task) end
  return seen_line(source, id)
end

-- Adds a line of the dedupe window to its order, and forgets the oldest lines: the window has the newest `most` of the
-- last 24 hours (the state-manager forgets older ones). pcall: if another program stores something else there, nothing
-- is forgotten.
local function put_in_order(base, field, created, most)
  local length = redis.pcall('RPUSH', base .. 'seen_order', created .. '\n' .. field)
  if type(length) == 'number' and length > tonumber(most or '1000000') then
    for _, old in ipairs(redis.call('LPOP', base .. 'seen_order', 2)) do
      redis.call('HDEL', base .. 'seen', string.match(old, '^%d+\n(.*)$'))
    end
  end
end

local function remember(base, field, value, created, most)
  redis.call('HSET', base .. 'seen', field, value)
  put_in_order(base, field, created, most)
end

-- Partition, digest and token of the holder of an id: a claim, a task of this partition (without a token), or an older
-- release's entry (without a digest, token 0).
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
    local header = redis.call('HGET', base .. 'task:' .. task, RUN.header)
    if header then return here, lines(header)[9], '' end
    local place = redis.call('HGET', base .. 'places', task)
    if place and place ~= here then return place, nil, '0' end
  end
  return nil
end

-- The meaning of a claim or a refusal in `seen` for a submit with this digest and token; nil if it may start.
local function misplaced(field, mark, digest, wanted, token)
  local place, of_claim = string.match(mark, '^@(%d+):(%d+)$')
  if place then return {digest == wanted and 'elsewhere' or 'taken', field, place, of_claim} end
  local refused = string.match(mark, '^!(%d+)$')
  if refused and tonumber(token == '' and '0' or token) <= tonumber(refused) then return {'again', field} end
  return nil
end
