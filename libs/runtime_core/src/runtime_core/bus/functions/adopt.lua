-- Reclaims the entries of dead owners on one stream. An owner is dead if it is in the group but not in `alive`. An
-- entry delivered three times is quarantined: it goes alone to one consumer that holds nothing else, and only a death
-- there counts; after the second death it is returned as condemned. Entries that were settled meanwhile, and the turn
-- of a dead owner, leave quarantine: the process that settled them may have died right after that.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 maximum number · 4 '1' if the owner holds nothing else: then only one quarantined
--      entry is given · 5 deliveries that quarantine · 6 deaths that condemn
-- RETURNS {'FENCED'} · {'OK', '1' if this owner should settle everything else for a quarantined entry, then per entry:
--         kind (`n` reclaimed, `q` quarantined, `c` condemned), id, deliveries, fields}

local ADOPTED, QUARANTINED, CONDEMNED = 'n', 'q', 'c'

-- Removes settled entries, and a dead owner's turn, from quarantine.
local function find_settled(base, key, group, stream, owner)
  local quarantine, settled = base .. 'quarantine', {}
  for _, field in ipairs(redis.call('HKEYS', quarantine)) do
    local over
    if field == '~' .. stream then
      local turn = redis.call('HGET', quarantine, field)
      over = turn ~= owner and not redis.call('ZSCORE', base .. 'alive', turn)
    elseif string.sub(field, 1, #stream + 1) == stream .. '|' then
      local id = string.sub(field, #stream + 2)
      over = #redis.call('XPENDING', key, group, id, id, 1) == 0
    end
    if over then settled[#settled + 1] = field end
  end
  return settled
end

-- Returns how an entry may be reclaimed now, or nil. An owner that holds other entries requests its turn in quarantine.
local function kind_of_entry(base, args, reply, id, deliveries)
  local quarantine, owner, stream = base .. 'quarantine', args[1], args[2]
  local deaths, kind = redis.call('HGET', quarantine, stream .. '|' .. id), ADOPTED
  if deaths and tonumber(deaths) >= tonumber(args[6]) then
    kind = CONDEMNED
  elseif deaths or deliveries >= tonumber(args[5]) then
    local turn = redis.call('HGET', quarantine, '~' .. stream)
    if turn and turn ~= owner then return nil end -- a dead owner's turn has been given up
    if args[4] ~= '1' then
      redis.call('HSET', quarantine, '~' .. stream, owner)
      reply[2] = '1'
      return nil
    end
    kind = QUARANTINED
  end
  if args[4] == '1' and kind ~= QUARANTINED then return nil end
  return kind
end

-- Gives an entry to the owner. Returns false if the entry is gone.
local function take_entry(base, args, key, group, reply, kind, id, deliveries)
  local quarantine, owner, stream = base .. 'quarantine', args[1], args[2]
  local claimed = redis.call('XCLAIM', key, group, owner, 0, id)
  if not claimed[1] then
    redis.call('XACK', key, group, id)
    redis.call('HDEL', quarantine, stream .. '|' .. id)
    return false
  end
  if kind == QUARANTINED then
    redis.call('HINCRBY', quarantine, stream .. '|' .. id, 1)
    redis.call('HSET', quarantine, '~' .. stream, owner)
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = kind, id, deliveries + 1, claimed[1][2]
  return true
end

-- Reclaims entries of one dead owner. Returns how many more fit, and whether one was given alone.
local function adopt_from(base, args, key, group, reply, dead_owner, room)
  for _, item in ipairs(redis.call('XPENDING', key, group, '-', '+', room + 100, dead_owner)) do
    if room <= 0 then break end
    local id, deliveries = item[1], item[4]
    local kind = kind_of_entry(base, args, reply, id, deliveries)
    if kind and take_entry(base, args, key, group, reply, kind, id, deliveries) then
      if kind == QUARANTINED then return 0, true end
      room = room - 1
    end
  end
  return room, false
end

local function adopt(keys, args)
  local base, owner, stream = keys[1], args[1], args[2]
  if not redis.call('ZSCORE', base .. 'alive', owner) then return {'FENCED'} end
  local key, group, room = base .. stream, group_of(stream), tonumber(args[3])
  local quarantine = base .. 'quarantine'
  -- Read everything first: these raise if a key has another type or the group is gone.
  local consumers = redis.call('XINFO', 'CONSUMERS', key, group)
  for _, field in ipairs(find_settled(base, key, group, stream, owner)) do redis.call('HDEL', quarantine, field) end
  local reply, given = {'OK', '0'}, false
  for _, info in ipairs(consumers) do
    local named = {}
    for i = 1, #info, 2 do named[info[i]] = info[i + 1] end
    if not redis.call('ZSCORE', base .. 'alive', named.name) then
      if named.pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', key, group, named.name)
      elseif room > 0 then
        local alone
        room, alone = adopt_from(base, args, key, group, reply, named.name, room)
        given = given or alone
      end
    end
  end
  if reply[2] == '0' and not given and redis.call('HGET', quarantine, '~' .. stream) == owner then
    redis.call('HDEL', quarantine, '~' .. stream)
  end
  return reply
end
