-- Takes over what dead owners of one stream hold. An owner is dead when the group knows it and `alive` does not.
-- An entry delivered three times is quarantined: it is given alone, to one consumer that has nothing else in hand,
-- and only a death there counts; after the second one it comes back as condemned. What is known of entries that have
-- been settled meanwhile, and the turn of a dead owner, are forgotten: who has settled them may have died right then.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 how many at most · 4 '1' where the owner holds nothing else: then only one quarantined
--      entry is given · 5 deliveries that quarantine · 6 deaths that condemn
-- RETURNS {'FENCED'} · {'OK', '1' where this owner shall empty its hands for a quarantined entry, then per entry: kind
--         (`n` adopted, `q` quarantined, `c` condemned), id, deliveries, fields}
local function adopt(keys, args)
  local base, owner, stream = keys[1], args[1], args[2]
  if not redis.call('ZSCORE', base .. 'alive', owner) then return {'FENCED'} end
  local key, group, room = base .. stream, group_of(stream), tonumber(args[3])
  local quarantine = base .. 'quarantine'
  -- Look at everything first: these raise where a key has another type or the group is gone.
  local consumers = redis.call('XINFO', 'CONSUMERS', key, group)
  local settled = {}
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
  for _, field in ipairs(settled) do redis.call('HDEL', quarantine, field) end
  local reply = {'OK', '0'}
  local given = false
  for _, info in ipairs(consumers) do
    local named = {}
    for i = 1, #info, 2 do named[info[i]] = info[i + 1] end
    if named.name ~= owner and not redis.call('ZSCORE', base .. 'alive', named.name) then
      if named.pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', key, group, named.name)
      elseif room > 0 then
        for _, item in ipairs(redis.call('XPENDING', key, group, '-', '+', room + 100, named.name)) do
          if room <= 0 then break end
          local id, deliveries = item[1], item[4]
          local deaths = redis.call('HGET', quarantine, stream .. '|' .. id)
          local kind = 'n'
          if deaths and tonumber(deaths) >= tonumber(args[6]) then
            kind = 'c'
          elseif deaths or deliveries >= tonumber(args[5]) then
            kind = 'q'
            local turn = redis.call('HGET', quarantine, '~' .. stream)
            if turn and turn ~= owner and redis.call('ZSCORE', base .. 'alive', turn) then
              kind = ''
            elseif args[4] ~= '1' then
              redis.call('HSET', quarantine, '~' .. stream, owner)
              reply[2] = '1'
              kind = ''
            end
          end
          if kind ~= '' and (args[4] ~= '1' or kind == 'q') then
            local claimed = redis.call('XCLAIM', key, group, owner, 0, id)
            if claimed[1] then
              if kind == 'q' then
                redis.call('HINCRBY', quarantine, stream .. '|' .. id, 1)
                redis.call('HSET', quarantine, '~' .. stream, owner)
                given = true
                room = 0
              end
              room = room - 1
              reply[#reply + 1] = kind
              reply[#reply + 1] = id
              reply[#reply + 1] = deliveries + 1
              reply[#reply + 1] = claimed[1][2]
            else
              -- The entry is no more: nothing is left to do for it.
              redis.call('XACK', key, group, id)
              redis.call('HDEL', quarantine, stream .. '|' .. id)
            end
          end
        end
      end
    end
  end
  if reply[2] == '0' and not given and redis.call('HGET', quarantine, '~' .. stream) == owner then
    redis.call('HDEL', quarantine, '~' .. stream)
  end
  return reply
end
