-- Creates a run node or a group of nodes, unless this id exists. The server refuses it at maxmemory.
-- KEYS 1 base · ARGV 1 `node` or `group` · 2 id · 3 its constant part (JSON) · 4 its group, or the parent group, or ''
--      5 the root node of its subgroup, or '' · 6 how long it is kept while it has not ended (s)
--      7 indexes, one per line
--      8… a group's root nodes
-- RETURNS {'created'} · {'known'} it exists with equal content · {'other'} with different content · {'no_group', id}
--         {'ended', id, status} the group has · {'no_sub_group', root} · {'full', id} · {'overloaded', message}
local function create_node(keys, args)
  local base, id, group, root, seconds = keys[1], args[2], args[4], args[5], tonumber(args[6])
  local key = base .. args[1] .. ':' .. id
  local there = redis.call('HGET', key, NODE.value)
  if there then return {there == args[3] and 'known' or 'other'} end
  local overload = redis.call('HGET', base .. 'meta', 'overload')
  if overload and overload ~= '' then return {'overloaded', overload} end
  local above = {}
  if group ~= '' then
    above = redis.call('HMGET', base .. 'group:' .. group, NODE.status, NODE.sub_group .. root)
    if not above[1] then return {'no_group', group} end
    if NODE_OVER[above[1]] then return {'ended', group, above[1]} end
    if args[1] == 'node' and not above[2] then return {'no_sub_group', root} end
    if NODE_OVER[above[2] or ''] then return {'ended', group .. '/' .. root, above[2]} end
    if redis.call('ZCARD', base .. 'nodes:group/' .. group) >= MEMBERS_MAX then return {'full', group} end
  end
  if #args - 7 > MEMBERS_MAX then return {'full', id} end
  check_node(base, group)
  local now = now_ms(base)

  if args[1] == 'node' then
    redis.call('HSET', key, NODE.value, args[3], NODE.status, 'INIT', NODE.created, text(now), NODE.group, group,
      NODE.root, root, NODE.indexes, args[7])
    keep_node(base, id, args[7], seconds, now)
  else
    local failed = {}
    local roots = {}
    for at = 8, #args do
      roots[#roots + 1] = redis.call('HMGET', base .. 'node:' .. args[at], NODE.status, NODE.group, NODE.indexes)
    end
    redis.call('HSET', key, NODE.value, args[3], NODE.status, 'INIT', NODE.created, text(now), NODE.parent, group,
      NODE.unfinished, #args - 7)
    redis.call('EXPIRE', key, seconds)
    for at = 8, #args do
      local v, node = roots[at - 7], base .. 'node:' .. args[at]
      redis.call('HSET', key, NODE.sub_group .. args[at], 'INIT')
      -- A node that was there before its group becomes the root of its subgroup.
      if v[1] and v[2] == '' then
        local indexes = v[3] .. (v[3] ~= '' and '\n' or '') .. 'group/' .. id
        redis.call('HSET', node, NODE.group, id, NODE.root, args[at], NODE.indexes, indexes)
        keep_node(base, args[at], indexes, seconds, now)
        if NODE_OVER[v[1]] and v[1] ~= 'SUCCESS' then failed[#failed + 1] = args[at] end
      end
    end
    if group ~= '' and not above[2] then
      redis.call('HSET', base .. 'group:' .. group, NODE.sub_group .. id, 'INIT')
      redis.call('HINCRBY', base .. 'group:' .. group, NODE.unfinished, 1)
    end
    for _, node in ipairs(failed) do end_sub_group(base, id, node, 'FAILED', now) end
  end
  if group ~= '' then redis.call('EXPIRE', base .. 'group:' .. group, seconds) end
  return {'created'}
end
