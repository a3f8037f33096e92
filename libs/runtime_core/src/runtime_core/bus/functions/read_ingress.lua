-- Reads the next entries of one publisher's ingress stream, bounded by number and by bytes.
-- KEYS 1 base: for this function the publisher's stream itself
-- ARGV 1 where to begin: `-`, or `(` and the id of the last held entry · 2 maximum entries · 3 maximum bytes
--      4 the largest entry that is returned whole, in bytes · 5 an id this many ms ahead of the clock ends the stream
-- RETURNS entries as {id, 0, {field, value, …}} · {id, its bytes, the heads of its fields} for one that is too large
local ENTRY_OVERHEAD = 16
local HEAD_FIELDS = 64
local HEAD_BYTES = 4096
local LAST_ID = '18446744073709551615-18446744073709551615'

local function size_of(fields)
  local size = ENTRY_OVERHEAD * #fields
  for _, part in ipairs(fields) do size = size + #part end
  return size
end

local function heads_of(fields)
  local heads = {}
  for at = 1, math.min(#fields, HEAD_FIELDS) do heads[at] = string.sub(fields[at], 1, HEAD_BYTES) end
  return heads
end

-- An entry with the largest possible id ends the stream: the server creates no id after it.
local function is_spent(key, ahead)
  if redis.call('EXISTS', key) == 0 then return false end
  local info = redis.call('XINFO', 'STREAM', key)
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then
      return tonumber(ms_of(info[at + 1])) > server_ms() + ahead
    end
  end
  return false
end

local function read_ingress(keys, args)
  local key, start, found = keys[1], args[1], {}
  local count, room, whole = tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  -- One at a time: entries beyond the bound must not come into memory here either.
  while #found < count and room > 0 and start ~= '(' .. LAST_ID do
    local entry = redis.call('XRANGE', key, start, '+', 'COUNT', 1)[1]
    if not entry then break end
    local size = size_of(entry[2])
    room = room - size
    if size > whole then found[#found + 1] = {entry[1], size, heads_of(entry[2])}
    else found[#found + 1] = {entry[1], 0, entry[2]} end
    start = '(' .. entry[1]
  end
  -- Still at the start: there was no entry.
  if start == '-' and is_spent(key, tonumber(args[5])) then redis.call('DEL', key) end
  return found
end
