-- Run nodes and groups that user code creates itself: shared by `create_node` and `node`.
--   nodes:<index>  node ids by expiry time (ms): `task/<id>`, `session/<id>`, `busi/<type>/<id>`, `group/<id>`
--   states         changes, for waiters; a wait that misses an entry reads the node itself

-- The hashes `node:<id>` and `group:<id>`.
local NODE = {
  value = 'v',              -- what never changes (JSON)
  status = 's',
  created = 'c',            -- ms; the next two as well
  started = 'x',            -- when it ran first
  ended = 'd',
  message = 'm',
  group = 'g',              -- of a node: its group, and
  root = 'root',            -- the root node of its sub group
  indexes = 'ix',           -- one a line
  token = 'k',              -- of the call that made the last change
  result = 'r:',            -- + name: when the result was first saved (13 digits, ms) and JSON
  parent = 'p',             -- of a group: the group around it
  unfinished = 'left',      -- how many sub groups are not finished
  sub_group = 'sub:',       -- + root node: the sub group's status
}

local NODE_OVER = {SUCCESS = true, FAILED = true, TIMEOUT = true}
local MEMBERS_MAX = 1000
local GROUPS_AROUND_MAX = 100

local function retention_of(base) return tonumber(redis.call('HGET', base .. 'meta', 'retention') or '3600') end

-- Renews the life of a node and its places in the indexes by this many seconds; expired ids leave the indexes.
-- pcall: if another program stores something else under an index's key, only that index is lost.
local function keep_node(base, id, indexes, seconds, now)
  redis.call('EXPIRE', base .. 'node:' .. id, seconds)
  if indexes == '' then return end
  for _, index in ipairs(lines(indexes)) do
    local key = base .. 'nodes:' .. index
    redis.pcall('ZADD', key, text(now + seconds * 1000), id)
    redis.pcall('ZREMRANGEBYSCORE', key, '-inf', '(' .. text(now))
    local last = redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
    if last[2] then redis.call('PEXPIREAT', key, text(tonumber(last[2]))) end
  end
end

-- The keys that a change writes besides the node itself: the groups around it may end with it. A group whose id was
-- created again after it had expired may lie inside itself.
local function check_node(base, group)
  check_stream(base, 'states')
  redis.call('HLEN', base .. 'meta')
  local around = 0
  while group and group ~= '' do
    around = around + 1
    if around > GROUPS_AROUND_MAX then
      error({err = 'ERR weft: group ' .. group .. ' lies in over ' .. GROUPS_AROUND_MAX .. ' groups, or in itself'})
    end
    group = redis.call('HGET', base .. 'group:' .. group, NODE.parent)
  end
end

-- A group has ended: it and its members are kept as long as an ended task.
local function end_group(base, group, status, now)
  local key = base .. 'group:' .. group
  local retention = retention_of(base)
  redis.call('HSET', key, NODE.status, status, NODE.ended, text(now))
  redis.call('EXPIRE', key, retention)
  for _, id in ipairs(redis.pcall('ZRANGE', base .. 'nodes:group/' .. group, 0, -1)) do
    local v = redis.pcall('HMGET', base .. 'node:' .. id, NODE.status, NODE.indexes)
    if v[1] and NODE_OVER[v[1]] then keep_node(base, id, v[2] or '', retention, now) end
  end
  tell_state(base, 'group/' .. group, status)
end

-- A subgroup is finished, or a member of it has failed. A group ends FAILED with the first failure and SUCCESS with
-- the last subgroup, and so does a group around it, if its id stands for a subgroup.
local function end_sub_group(base, group, root, status, now)
  while group and group ~= '' do
    local key = base .. 'group:' .. group
    local v = redis.call('HMGET', key, NODE.status, NODE.parent, NODE.sub_group .. root)
    if not v[1] or not v[3] or v[3] == 'FAILED' or (v[3] == 'SUCCESS' and status == 'SUCCESS') then return end
    redis.call('HSET', key, NODE.sub_group .. root, status)
    -- A failure that comes after its subgroup was finished still counts: a group never hides one.
    local left = redis.call('HINCRBY', key, NODE.unfinished, -1)
    if NODE_OVER[v[1]] then return end
    if status == 'SUCCESS' and left > 0 then return end
    end_group(base, group, status, now)
    root, group = group, v[2]
  end
end
