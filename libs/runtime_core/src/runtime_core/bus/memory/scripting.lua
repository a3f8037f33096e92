-- The environment that servers give to functions and scripts, for the in-process broker.
--
-- Takes what Python lends to it and returns what Python calls; see memory/lua.py, which also says how replies cross
-- the border between the two languages. Nothing of Python is reachable from the environment itself.

local lent = ...
local dispatch, sha1hex, write_log, cjson, cmsgpack =
  lent.dispatch, lent.sha1hex, lent.write_log, lent.cjson, lent.cmsgpack
local type, error, pcall, xpcall, tostring, tonumber, select, unpack, rawget, pairs, ipairs, setmetatable, getinfo =
  type, error, pcall, xpcall, tostring, tonumber, select, unpack, rawget, pairs, ipairs, setmetatable, debug.getinfo
local loadstring, setfenv, find, sub, gsub, concat =
  loadstring, setfenv, string.find, string.sub, string.gsub, table.concat

-- More values than this do not fit on Lua's stack in one call.
local MANY = 4000
-- What this broker lends to scripts is in files of this name; errors are said to come from the code that called it.
local LENT = '^@memory/'

-- While a library loads: its functions so far, by name. Else nil.
local loading = nil

-- A reply of a command, as `kind, …`: see LuaScripts._call.
local function receive(kind, ...)
  if kind == false then return {...} end
  if kind == true then return {ok = (...)} end
  if kind == nil then
    local text = ...
    if text then return nil, {err = text} end
    return false
  end
  return kind
end

local function refuse_while_loading(name)
  if loading then error("attempt to call field '" .. name .. "' (a nil value)", 3) end
end

local redis = {LOG_DEBUG = 0, LOG_VERBOSE = 1, LOG_NOTICE = 2, LOG_WARNING = 3}

function redis.call(...)
  refuse_while_loading('call')
  local reply, failure = receive(dispatch(...))
  if failure then error(failure, 0) end
  return reply
end

function redis.pcall(...)
  refuse_while_loading('pcall')
  local reply, failure = receive(dispatch(...))
  if failure then return failure end
  return reply
end

-- `-CODE text` and `CODE text` keep their code, a single word gets `ERR` in front.
function redis.error_reply(text)
  if type(text) ~= 'string' then return {err = 'ERR wrong number or type of arguments'} end
  if sub(text, 1, 1) == '-' then text = sub(text, 2) end
  text = gsub(gsub(text, '^[\r\n]+', ''), '[\r\n]+$', '')
  if not find(text, ' ', 1, true) then text = 'ERR ' .. text end
  return {err = text}
end

function redis.status_reply(text)
  if type(text) ~= 'string' then return {err = 'ERR wrong number or type of arguments'} end
  return {ok = text}
end

function redis.sha1hex(...)
  if select('#', ...) ~= 1 then error({err = 'ERR wrong number of arguments'}, 0) end
  return sha1hex(tostring((...)))
end

function redis.log(level, ...)
  if select('#', ...) == 0 then error({err = 'ERR redis.log() requires two arguments or more.'}, 0) end
  if type(level) ~= 'number' then error({err = 'ERR First argument must be a number (log level).'}, 0) end
  if level < 0 or level > 3 then error({err = 'ERR Invalid debug level.'}, 0) end
  local words = {}
  for i = 1, select('#', ...) do words[i] = tostring((select(i, ...))) end
  write_log(level, concat(words, ' '))
end

function redis.setresp(version)
  if version ~= 2 then error({err = 'ERR RESP version must be 2 here.'}, 0) end
end

local FLAGS = {['no-writes'] = true, ['allow-oom'] = true, ['allow-stale'] = true, ['no-cluster'] = true,
  ['allow-cross-slot-keys'] = true}

function redis.register_function(...)
  local function refuse(text) error({err = 'ERR ' .. text}, 0) end
  if not loading then refuse('redis.register_function can only be called on FUNCTION LOAD command') end
  local name, callback = ...
  local flags, description = {}, nil
  if select('#', ...) == 1 then
    local given = ...
    if type(given) ~= 'table' then
      refuse('calling redis.register_function with a single argument is only applicable to Lua table '
        .. '(representing named arguments).')
    end
    name, callback, description = given.function_name, given.callback, given.description
    for key in pairs(given) do
      if key ~= 'function_name' and key ~= 'callback' and key ~= 'flags' and key ~= 'description' then
        refuse('unknown argument given to redis.register_function')
      end
    end
    for _, flag in ipairs(given.flags or {}) do
      if not FLAGS[flag] then refuse('unknown flag given') end
      flags[#flags + 1] = flag
    end
  elseif select('#', ...) ~= 2 then
    refuse('wrong number of arguments to redis.register_function')
  end
  if type(name) ~= 'string' then refuse('first argument to redis.register_function must be a string') end
  if type(callback) ~= 'function' then refuse('second argument to redis.register_function must be a function') end
  if not find(name, '^[%w_]+$') then
    refuse('Library names can only contain letters, numbers, or underscores(_) and must be at least one character long')
  end
  for _, registered in ipairs(loading) do
    if registered.name == name then refuse('Function already exists in the library') end
  end
  loading[#loading + 1] =
    {name = name, callback = callback, flags = concat(flags, ','), description = description or false}
end

-- The environment. Tables are read through empty ones in front, which refuse to be written to.
local function refuse_write() error('Attempt to modify a readonly table', 2) end

local function read_only(inner)
  return setmetatable({}, {__index = inner, __newindex = refuse_write, __metatable = false})
end

local base = setmetatable({}, {__index = function(_, name)
  error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
end})
for _, name in ipairs({'assert', 'collectgarbage', 'coroutine', 'error', 'gcinfo', 'getmetatable', 'ipairs', 'next', 'pairs',
  'rawequal', 'rawget', 'select', 'setmetatable', 'tonumber', 'tostring', 'type', 'unpack',
  'xpcall', '_VERSION'}) do
  base[name] = _G[name]
end
for name, library in pairs({string = string, table = table, math = math, cjson = cjson, cmsgpack = cmsgpack}) do
  base[name] = read_only(library)
end
-- An error of a command is a table, but whoever catches it gets its text, as from servers.
local function caught(ok, raised, ...)
  if not ok and type(raised) == 'table' and type(raised.err) == 'string' then raised = raised.err end
  return ok, raised, ...
end
function base.pcall(...) return caught(pcall(...)) end
function base.rawset(into, key, value)
  if getmetatable(into) == false then refuse_write() end
  return rawset(into, key, value)
end
base.redis = read_only(redis)
base.server = base.redis

local function environment(inner)
  local outer = read_only(inner)
  rawset(inner, '_G', outer)
  return outer
end
local library_environment = environment(base)

-- Errors that nobody catches: where they were raised is said behind the text, as servers do.
local function on_error(failure)
  local level = 2
  local place = getinfo(level, 'Sl')
  while place and (place.what == 'C' or place.what == 'tail' or find(place.source, LENT)) do
    level = level + 1
    place = getinfo(level, 'Sl')
  end
  if type(failure) ~= 'table' then failure = {err = 'ERR ' .. tostring(failure)} end
  if place and place.currentline > 0 then
    failure.source = place.source
    failure.line = place.currentline
  end
  return failure
end

-- What a function returned, as values that cross the border without a table around them.
local function flatten(reply)
  local kind = type(reply)
  if kind == 'string' or kind == 'number' then return reply end
  if kind == 'boolean' then
    if reply then return 1 end
    return nil
  end
  if kind ~= 'table' then return nil end
  local failure = rawget(reply, 'err')
  if type(failure) == 'string' then return nil, failure end
  local status = rawget(reply, 'ok')
  if type(status) == 'string' then return true, status end
  local n = 0
  while rawget(reply, n + 1) ~= nil do n = n + 1 end
  if n > MANY then return '', reply, n end
  return false, unpack(reply, 1, n)
end

local function run(name, callback, keys, args)
  local ok, reply = xpcall(function() return callback(keys, args) end, on_error)
  if ok then return flatten(reply) end
  local text = tostring(reply.err)
  if reply.line then text = text .. ' script: ' .. name .. ', on ' .. reply.source .. ':' .. reply.line .. '.' end
  return nil, text
end

-- Arguments in one go, the first `count` of them keys.
local function invoke(name, callback, count, ...)
  local all = {...}
  return run(name, callback, {unpack(all, 1, count)}, {unpack(all, count + 1)})
end

-- A library's functions as `name, callback, flags, description, name, …`; or nil and what is wrong.
local function load_library(code)
  local chunk, failure = loadstring(code, '@user_function')
  if not chunk then return nil, 'ERR Error compiling function: ' .. failure end
  setfenv(chunk, library_environment)
  loading = {}
  local ok, raised = pcall(chunk)
  local registered = loading
  loading = nil
  if not ok then
    if type(raised) == 'table' then raised = gsub(tostring(raised.err), '^ERR ', '') end
    return nil, 'ERR Error registering functions: ' .. tostring(raised)
  end
  local found = {}
  for _, one in ipairs(registered) do
    found[#found + 1] = one.name
    found[#found + 1] = one.callback
    found[#found + 1] = one.flags
    found[#found + 1] = one.description
  end
  return true, unpack(found)
end

-- A script sees KEYS and ARGV as globals, so each run has an environment of its own.
local function evaluate(name, code, keys, args)
  local chunk, failure = loadstring(code, '@user_script')
  if not chunk then return nil, 'ERR Error compiling script (new function): ' .. failure end
  setfenv(chunk, environment(setmetatable({KEYS = keys, ARGV = args}, {__index = base})))
  return run(name, chunk, keys, args)
end

return {
  invoke = invoke,
  run = run,
  evaluate = evaluate,
  load_library = load_library,
  flatten = flatten,
  list = function(...) return {...} end,
  slice = function(list, first, last) return unpack(list, first, last) end,
}
