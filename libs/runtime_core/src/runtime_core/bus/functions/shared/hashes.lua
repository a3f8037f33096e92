-- Writes of many fields to a hash, in pieces: Lua passes no more than 8,000 values in one call.

local PIECE = 4000

-- `fields`: names and values in turn.
local function set_fields(key, fields)
  if #fields <= PIECE then return redis.call('HSET', key, unpack(fields)) end
  for i = 1, #fields, PIECE do redis.call('HSET', key, unpack(fields, i, math.min(i + PIECE - 1, #fields))) end
end

local function delete_fields(key, names)
  for i = 1, #names, PIECE do redis.call('HDEL', key, unpack(names, i, math.min(i + PIECE - 1, #names))) end
end
