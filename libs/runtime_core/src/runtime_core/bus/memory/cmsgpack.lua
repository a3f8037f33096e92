-- `cmsgpack` as scripts know it: pack and unpack. Takes from Python what Lua 5.1 lacks, the bytes of a double.

local lent = ...
local double_bytes, double_value = lent.double_bytes, lent.double_value
local floor = math.floor
local byte, char, sub = string.byte, string.char, string.sub
local concat = table.concat
-- Deeper tables are packed as nil, as servers do.
local DEPTH = 16

local function unsigned(value, width)
  local bytes = {}
  for i = width, 1, -1 do
    bytes[i] = char(value % 256)
    value = floor(value / 256)
  end
  return concat(bytes)
end

local function sized(length, small, limit, sizes)
  if length <= limit then return char(small + length) end
  for _, size in ipairs(sizes) do
    if length < 256 ^ size[2] then return char(size[1]) .. unsigned(length, size[2]) end
  end
  error('too large to pack', 0)
end

local STRINGS = {{0xd9, 1}, {0xda, 2}, {0xdb, 4}}
local ARRAYS = {{0xdc, 2}, {0xdd, 4}}
local MAPS = {{0xde, 2}, {0xdf, 4}}

local function pack_number(value)
  if value ~= floor(value) or value >= 2 ^ 63 or value < -2 ^ 63 then return double_bytes(value) end
  if value >= 0 then
    if value <= 127 then return char(value) end
    if value <= 0xff then return '\204' .. unsigned(value, 1) end
    if value <= 0xffff then return '\205' .. unsigned(value, 2) end
    if value <= 0xffffffff then return '\206' .. unsigned(value, 4) end
    return '\207' .. unsigned(value, 8)
  end
  if value >= -32 then return char(256 + value) end
  if value >= -128 then return '\208' .. unsigned(256 + value, 1) end
  if value >= -32768 then return '\209' .. unsigned(65536 + value, 2) end
  if value >= -2147483648 then return '\210' .. unsigned(4294967296 + value, 4) end
  -- Complement by halves: 2^64 and a small difference do not fit one double.
  local high = floor(value / 4294967296)
  return '\211' .. unsigned(4294967296 + high, 4) .. unsigned(value - high * 4294967296, 4)
end

-- The length of an array, or nil for a map: the empty table is an array.
local function array_length(value)
  local count, greatest = 0, 0
  for key in pairs(value) do
    if type(key) ~= 'number' or key < 1 or key ~= floor(key) then return nil end
    count = count + 1
    if key > greatest then greatest = key end
  end
  if count == greatest then return count end
end

local function pack(out, value, depth)
  local kind = type(value)
  if kind == 'string' then
    out[#out + 1] = sized(#value, 0xa0, 31, STRINGS)
    out[#out + 1] = value
  elseif kind == 'number' then
    out[#out + 1] = pack_number(value)
  elseif kind == 'boolean' then
    out[#out + 1] = value and '\195' or '\194'
  elseif kind == 'table' and depth < DEPTH then
    local length = array_length(value)
    if length then
      out[#out + 1] = sized(length, 0x90, 15, ARRAYS)
      for i = 1, length do pack(out, value[i], depth + 1) end
    else
      local count = 0
      for _ in pairs(value) do count = count + 1 end
      out[#out + 1] = sized(count, 0x80, 15, MAPS)
      for key, item in pairs(value) do
        pack(out, key, depth + 1)
        pack(out, item, depth + 1)
      end
    end
  else
    out[#out + 1] = '\192'
  end
end

local function missing() error('Missing bytes in input.', 0) end

local function read_unsigned(text, at, width)
  if at + width - 1 > #text then missing() end
  local value = 0
  for i = at, at + width - 1 do value = value * 256 + byte(text, i) end
  return value, at + width
end

local function read_signed(text, at, width)
  local value, after = read_unsigned(text, at, width)
  if byte(text, at) < 128 then return value, after end
  if width < 8 then return value - 256 ^ width, after end
  local high = read_unsigned(text, at, 4) - 4294967296
  return high * 4294967296 + read_unsigned(text, at + 4, 4), after
end

local function read_text(text, at, length)
  if at + length - 1 > #text then missing() end
  return sub(text, at, at + length - 1), at + length
end

local unpack_one

local function read_array(text, at, length)
  local array = {}
  for i = 1, length do array[i], at = unpack_one(text, at) end
  return array, at
end

local function read_map(text, at, count)
  local map = {}
  for _ = 1, count do
    local key, item
    key, at = unpack_one(text, at)
    item, at = unpack_one(text, at)
    if key == nil then error('Bad data format in input.', 0) end
    map[key] = item
  end
  return map, at
end

local function read_double(width)
  return function(text, at)
    local bytes, after = read_text(text, at, width)
    return double_value(bytes), after
  end
end

local function with_length(read, width)
  return function(text, at)
    local length, after = read_unsigned(text, at, width)
    return read(text, after, length)
  end
end

local function with_width(read, width)
  return function(text, at) return read(text, at, width) end
end

local READERS = {
  [0xc0] = function(_, at) return nil, at end,
  [0xc2] = function(_, at) return false, at end,
  [0xc3] = function(_, at) return true, at end,
  [0xc4] = with_length(read_text, 1), [0xc5] = with_length(read_text, 2), [0xc6] = with_length(read_text, 4),
  [0xca] = read_double(4), [0xcb] = read_double(8),
  [0xcc] = with_width(read_unsigned, 1), [0xcd] = with_width(read_unsigned, 2),
  [0xce] = with_width(read_unsigned, 4), [0xcf] = with_width(read_unsigned, 8),
  [0xd0] = with_width(read_signed, 1), [0xd1] = with_width(read_signed, 2),
  [0xd2] = with_width(read_signed, 4), [0xd3] = with_width(read_signed, 8),
  [0xd9] = with_length(read_text, 1), [0xda] = with_length(read_text, 2), [0xdb] = with_length(read_text, 4),
  [0xdc] = with_length(read_array, 2), [0xdd] = with_length(read_array, 4),
  [0xde] = with_length(read_map, 2), [0xdf] = with_length(read_map, 4),
}

function unpack_one(text, at)
  local first = byte(text, at)
  if not first then missing() end
  at = at + 1
  if first <= 0x7f then return first, at end
  if first >= 0xe0 then return first - 256, at end
  if first <= 0x8f then return read_map(text, at, first - 0x80) end
  if first <= 0x9f then return read_array(text, at, first - 0x90) end
  if first <= 0xbf then return read_text(text, at, first - 0xa0) end
  local read = READERS[first]
  if not read then error('Bad data format in input.', 0) end
  return read(text, at)
end

return {
  pack = function(...)
    local count = select('#', ...)
    if count == 0 then error("bad argument #0 to 'pack' (MessagePack pack needs input.)", 2) end
    local out = {}
    for i = 1, count do pack(out, (select(i, ...)), 0) end
    return concat(out)
  end,
  unpack = function(text)
    if type(text) ~= 'string' then
      error("bad argument #1 to 'unpack' (string expected, got " .. type(text) .. ')', 2)
    end
    local found, count, at = {}, 0, 1
    while at <= #text do
      count = count + 1
      found[count], at = unpack_one(text, at)
    end
    return unpack(found, 1, count)
  end,
}
