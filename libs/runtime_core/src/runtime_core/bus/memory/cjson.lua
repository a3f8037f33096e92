-- `cjson` as scripts know it: encode, decode, null. Strings are bytes and pass through as they are.

local null = newproxy()
local floor, huge = math.floor, math.huge
local byte, char, find, format, gsub, match, sub =
  string.byte, string.char, string.find, string.format, string.gsub, string.match, string.sub
local concat = table.concat
local DEPTH = 1000

local ESCAPES = {['"'] = '\\"', ['\\'] = '\\\\', ['/'] = '\\/', ['\b'] = '\\b', ['\f'] = '\\f', ['\n'] = '\\n',
  ['\r'] = '\\r', ['\t'] = '\\t', ['\127'] = '\\u007f'}
for code = 0, 31 do
  local control = char(code)
  ESCAPES[control] = ESCAPES[control] or format('\\u%04x', code)
end

local function quote(text) return '"' .. gsub(text, '[%c"\\/\127]', ESCAPES) .. '"' end

local function number(value)
  if value ~= value or value == huge or value == -huge then
    error('Cannot serialise number: must not be NaN or Inf', 0)
  end
  return format('%.14g', value)
end

-- The length of an array, or nil for an object: the empty table is an object.
local function array_length(value)
  local count, greatest = 0, 0
  for key in pairs(value) do
    if type(key) ~= 'number' or key < 1 or key ~= floor(key) then return nil end
    count = count + 1
    if key > greatest then greatest = key end
  end
  if greatest > 10 and greatest > count * 2 then error('Cannot serialise table: excessively sparse array', 0) end
  if greatest > 0 then return greatest end
end

local function encode(value, depth)
  local kind = type(value)
  if kind == 'string' then return quote(value) end
  if kind == 'number' then return number(value) end
  if kind == 'boolean' then return tostring(value) end
  if value == nil or value == null then return 'null' end
  if kind ~= 'table' then error('Cannot serialise ' .. kind .. ': type not supported', 0) end
  if depth > DEPTH then error('Cannot serialise, excessively nested', 0) end
  local parts = {}
  local length = array_length(value)
  if length then
    for i = 1, length do parts[i] = encode(value[i], depth + 1) end
    return '[' .. concat(parts, ',') .. ']'
  end
  for key, item in pairs(value) do
    local name
    if type(key) == 'string' then name = quote(key)
    elseif type(key) == 'number' then name = '"' .. number(key) .. '"'
    else error('Cannot serialise ' .. type(key) .. ': table key must be a number or string', 0) end
    parts[#parts + 1] = name .. ':' .. encode(item, depth + 1)
  end
  return '{' .. concat(parts, ',') .. '}'
end

local function utf8(code)
  if code < 0x80 then return char(code) end
  if code < 0x800 then return char(0xC0 + floor(code / 64), 0x80 + code % 64) end
  if code < 0x10000 then
    return char(0xE0 + floor(code / 4096), 0x80 + floor(code / 64) % 64, 0x80 + code % 64)
  end
  return char(0xF0 + floor(code / 262144), 0x80 + floor(code / 4096) % 64, 0x80 + floor(code / 64) % 64, 0x80 + code % 64)
end

local PLAIN = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', b = '\b', f = '\f', n = '\n', r = '\r', t = '\t'}

local function invalid(expected, text, at)
  local what = at > #text and 'T_END' or 'invalid token'
  error(format('Expected %s but found %s at character %d', expected, what, at), 0)
end

-- `at` is behind the opening quote; returns the string and the place behind the closing one.
local function read_string(text, at)
  local stop = find(text, '["\\%c]', at)
  if stop and byte(text, stop) == 34 then return sub(text, at, stop - 1), stop + 1 end
  local parts = {}
  while true do
    stop = find(text, '["\\%c]', at)
    if not stop then invalid('value', text, #text + 1) end
    parts[#parts + 1] = sub(text, at, stop - 1)
    local found = sub(text, stop, stop)
    if found == '"' then return concat(parts), stop + 1 end
    if found == '\127' then
      parts[#parts + 1] = found
      at = stop + 1
    elseif found ~= '\\' then
      invalid('value', text, stop)
    else
      local escape = sub(text, stop + 1, stop + 1)
      if escape == 'u' then
        local digits = match(text, '^%x%x%x%x', stop + 2)
        if not digits then invalid('value', text, stop) end
        local code = tonumber(digits, 16)
        at = stop + 6
        if code >= 0xD800 and code <= 0xDBFF then
          local low = match(text, '^\\u(%x%x%x%x)', at)
          low = low and tonumber(low, 16)
          if not low or low < 0xDC00 or low > 0xDFFF then invalid('value', text, stop) end
          code = 0x10000 + (code - 0xD800) * 0x400 + (low - 0xDC00)
          at = at + 6
        elseif code >= 0xDC00 and code <= 0xDFFF then
          invalid('value', text, stop)
        end
        parts[#parts + 1] = utf8(code)
      else
        if not PLAIN[escape] then invalid('value', text, stop) end
        parts[#parts + 1] = PLAIN[escape]
        at = stop + 2
      end
    end
  end
end

local function blank(text, at) return find(text, '[^ \t\r\n]', at) or #text + 1 end

local read_value

local function read_object(text, at, depth)
  local object = {}
  at = blank(text, at)
  if sub(text, at, at) == '}' then return object, at + 1 end
  while true do
    if sub(text, at, at) ~= '"' then invalid('object key string', text, at) end
    local key
    key, at = read_string(text, at + 1)
    at = blank(text, at)
    if sub(text, at, at) ~= ':' then invalid('colon', text, at) end
    object[key], at = read_value(text, blank(text, at + 1), depth)
    at = blank(text, at)
    local found = sub(text, at, at)
    if found == '}' then return object, at + 1 end
    if found ~= ',' then invalid('comma or object end', text, at) end
    at = blank(text, at + 1)
  end
end

local function read_array(text, at, depth)
  local array, length = {}, 0
  at = blank(text, at)
  if sub(text, at, at) == ']' then return array, at + 1 end
  while true do
    length = length + 1
    array[length], at = read_value(text, at, depth)
    at = blank(text, at)
    local found = sub(text, at, at)
    if found == ']' then return array, at + 1 end
    if found ~= ',' then invalid('comma or array end', text, at) end
    at = blank(text, at + 1)
  end
end

function read_value(text, at, depth)
  if depth > DEPTH then error('Found too many nested data structures (' .. depth .. ')', 0) end
  local found = sub(text, at, at)
  if found == '"' then return read_string(text, at + 1) end
  if found == '{' then return read_object(text, at + 1, depth + 1) end
  if found == '[' then return read_array(text, at + 1, depth + 1) end
  local word = match(text, '^[%w%.%+%-]+', at) or ''
  if word == 'true' then return true, at + 4 end
  if word == 'false' then return false, at + 5 end
  if word == 'null' then return null, at + 4 end
  local value = find(word, '^-?%d') and tonumber(word)
  if not value then invalid('value', text, at) end
  return value, at + #word
end

return {
  null = null,
  encode = function(...)
    if select('#', ...) ~= 1 then error("bad argument #1 to 'encode' (expected 1 argument)", 2) end
    return encode((...), 1)
  end,
  decode = function(...)
    local text = ...
    if type(text) == 'number' then text = tostring(text) end
    if select('#', ...) ~= 1 or type(text) ~= 'string' then
      error("bad argument #1 to 'decode' (string expected, got " .. type(text) .. ')', 2)
    end
    local value, at = read_value(text, blank(text, 1), 0)
    at = blank(text, at)
    if at <= #text then invalid('the end', text, at) end
    return value
  end,
}
