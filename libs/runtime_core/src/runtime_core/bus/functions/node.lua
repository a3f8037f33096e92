-- Changes a run node or a group that `create_node` has created. One of several processes wins; repeating the same
-- change changes nothing.
-- KEYS 1 base · ARGV 1 verb · 2 id · 3 how long it is kept while it has not ended (s), then for
--      `move`    4 status · 5 token of this call · 6 message · 7… pairs of a result's name and JSON
--      `save`    4… pairs of a result's name and JSON
--      `sub`     (a group) 4 root node of one more subgroup
--      `finish`  (a group) 4 root node · 5 `SUCCESS` or `FAILED` · 6 message
-- RETURNS {'moved'}, if this call or its repeat did it · {'same'} it was so before · {'unknown'}
--         {'refused', its current status} · {'no_sub_group'} · {'full'}
local NODE_NEXT = {
  INIT = {RUNNING = true, FAILED = true, TIMEOUT = true},
  RUNNING = {BREAKED = true, SUCCESS = true, FAILED = true, TIMEOUT = true},
  BREAKED = {RUNNING = true, SUCCESS = true, FAILED = true, TIMEOUT = true},
  SUCCESS = {},
  FAILED = {},
  TIMEOUT = {},
}

local function save_results(key, args, from, now)
  for at = from, #args, 2 do
    local field = NODE.result .. args[at]
    local old = redis.call('HGET', key, field)
    redis.call('HSET', key, field, (old and string.sub(old, 1, 13) or text(now)) .. args[at + 1])
  end
end

local function change_node(base, args)
  local id, key = args[2], base .. 'node:' .. args[2]
  local v = redis.call('HMGET', key, NODE.status, NODE.group, NODE.root, NODE.indexes, NODE.token,
    NODE.started)
  if not v[1] then return {'unknown'} end
  local seconds, now, group = tonumber(args[3]), now_ms(base), v[2] or ''
  check_node(base, group)
  if args[1] == 'save' then
    save_results(key, args, 4, now)
    if not NODE_OVER[v[1]] then keep_node(base, id, v[4], seconds, now) end
    return {'moved'}
  end
  local to = args[4]
  if v[1] == to then return {v[5] == args[5] and 'moved' or 'same'} end
  if not NODE_NEXT[v[1]][to] then return {'refused', v[1]} end
  local group_status = group ~= '' and redis.call('HGET', base .. 'group:' .. group, NODE.status)

  redis.call('HSET', key, NODE.status, to, NODE.token, args[5], NODE.message, args[6])
  save_results(key, args, 7, now)
  if to == 'RUNNING' and not v[6] then redis.call('HSET', key, NODE.started, text(now)) end
  if NODE_OVER[to] then redis.call('HSET', key, NODE.ended, text(now)) end
  -- A member stays until its group has ended: a waiter for the group reads its members' results.
  local over = NODE_OVER[to] and (not group_status or NODE_OVER[group_status])
  keep_node(base, id, v[4], over and retention_of(base) or seconds, now)
  tell_state(base, 'node/' .. id, to)
  if group_status then
    if to == 'RUNNING' and group_status == 'INIT' then
      redis.call('HSET', base .. 'group:' .. group, NODE.status, 'RUNNING')
    end
    if to == 'FAILED' or to == 'TIMEOUT' then end_sub_group(base, group, v[3], 'FAILED', now) end
  end
  return {'moved'}
end

local function change_group(base, args)
  local id, key, root = args[2], base .. 'group:' .. args[2], args[4]
  local v = redis.call('HMGET', key, NODE.status, NODE.sub_group .. root)
  if not v[1] then return {'unknown'} end
  check_node(base, id)
  if args[1] == 'sub' then
    if v[2] then return {'same'} end
    if NODE_OVER[v[1]] then return {'refused', v[1]} end
    if redis.call('HLEN', key) >= MEMBERS_MAX then return {'full'} end
    redis.call('HSET', key, NODE.sub_group .. root, 'INIT')
    redis.call('HINCRBY', key, NODE.unfinished, 1)
    redis.call('EXPIRE', key, tonumber(args[3]))
    return {'moved'}
  end
  if not v[2] then return {'no_sub_group'} end
  if v[2] == args[5] then return {'same'} end
  if NODE_OVER[v[2]] then return {'refused', v[2]} end
  if args[6] ~= '' then redis.call('HSET', key, NODE.message, args[6]) end
  if v[1] == 'INIT' then redis.call('HSET', key, NODE.status, 'RUNNING') end
  if not NODE_OVER[v[1]] then redis.call('EXPIRE', key, tonumber(args[3])) end
  end_sub_group(base, id, root, args[5], now_ms(base))
  return {'moved'}
end

local function node(keys, args)
  if args[1] == 'sub' or args[1] == 'finish' then return change_group(keys[1], args) end
  return change_node(keys[1], args)
end
