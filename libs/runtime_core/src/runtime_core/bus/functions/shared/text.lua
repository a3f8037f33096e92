-- Text: numbers, lines, JSON strings and error objects.

local function text(n) return string.format('%.0f', n) end

local function lines(s)
  local out = {}
  for line in string.gmatch(s .. '\n', '(.-)\n') do out[#out + 1] = line end
  return out
end

local function quote(s)
  return cjson.encode(tostring(s))
end

local function error_json(kind, message)
  return '{"type":' .. quote(kind) .. ',"message":' .. quote(message) .. '}'
end

local function with_member(context, name, value)
  if context == '' or context == '{}' then return '{"' .. name .. '":' .. value .. '}' end
  return string.sub(context, 1, -2) .. ',"' .. name .. '":' .. value .. '}'
end
