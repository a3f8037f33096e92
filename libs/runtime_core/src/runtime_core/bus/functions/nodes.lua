-- Run nodes and groups that user code makes itself: what `create_node` and `node` share.
--   node:<id>    v  what never changes (JSON) · s  status · c, x, d  when created, first run, ended (ms) · m  its message
--                g, root  its group and the root node of its sub group · ix  its indexes, one a line · k  token of the
--                last change · r:<name>  a result: when it was first saved (13 digits, ms) and JSON
--   group:<id>   v, s, c, d, m, as above · p  the parent group · left  sub groups not finished · sub:<root>  a sub group's status
--   nodes:<ix>   node ids by when they expire (ms): `task/<id>`, `session/<id>`, `busi/<type>/<id>`, `group/<id>`
--   states       what has changed, for those who wait; a wait that misses an entry looks at the node itself

local NODE_OVER = {SUCCESS = true, FAILED = true, TIMEOUT = true}
local MEMBERS_MAX = 1000

local function retention_of(base) return tonumber(redis.call('HGET', base .. 'meta', 'retention') or '3600') end

-- A node and its places in the indexes live for so many seconds from now on; what has expired leaves the indexes.
-- pcall: where another program has put something else in the place of an index, only that index is lost.
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

-- What a change writes to besides the node itself: the groups around it may end with it.
local function check_node(base, group)
  check_stream(base, 'states')
  redis.call('HLEN', base .. 'meta')
  while group and group ~= '' do group = redis.call('HGET', base .. 'group:' .. group, 'p') end
end

-- A group has ended: it and its members are kept as long as an ended task is.
local function end_group(base, group, status, now)
  local key = base .. 'group:' .. group
  local retention = retention_of(base)
  redis.call('HSET', key, 's', status, 'd', text(now))
  redis.call('EXPIRE', key, retention)
  for _, id in ipairs(redis.pcall('ZRANGE', base .. 'nodes:group/' .. group, 0, -1)) do
    local v = redis.pcall('HMGET', base .. 'node:' .. id, 's', 'ix')
    if v[1] and NODE_OVER[v[1]] then keep_node(base, id, v[2] or '', retention, now) end
  end
  tell_state(base, 'group/' .. group, status)
end

-- A sub group is finished, or a member of it has failed. A group ends FAILED with the first failure and SUCCESS with
-- the last sub group, and so does a group around it, where its id stands for a sub group.
local function end_sub_group(base, group, root, status, now)
  while group and group ~= '' do
    local key = base .. 'group:' .. group
    local v = redis.call('HMGET', key, 's', 'p', 'sub:' .. root)
    if not v[1] or not v[3] or v[3] == 'FAILED' or (v[3] == 'SUCCESS' and status == 'SUCCESS') then return end
    redis.call('HSET', key, 'sub:' .. root, status)
    -- A failure that comes after its sub group was finished still counts: a group never hides one.
    local left = redis.call('HINCRBY', key, 'left', -1)
    if NODE_OVER[v[1]] then return end
    if status == 'SUCCESS' and left > 0 then return end
    end_group(base, group, status, now)
    root, group = group, v[2]
  end
end
