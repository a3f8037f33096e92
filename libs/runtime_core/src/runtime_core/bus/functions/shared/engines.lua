-- Steps on a cluster (Ray, Spark): which gateways serve a stream, and how long a step waits for one.

-- The number of gateways that serve an engine's stream: those that have announced it and are alive.
local function gateways_of(base, stream)
  local live = 0
  for _, member in ipairs(redis.call('ZRANGE', base .. 'gateways', 0, -1)) do
    local serves, owner = string.match(member, '^(%S+) (.*)$')
    if serves == stream and redis.call('ZSCORE', base .. 'alive', owner) then live = live + 1 end
  end
  return live
end

local function no_gateway(stream)
  local engine, pool = string.match(stream, '^([^:]*):?(.*)$')
  if pool ~= '' then
    return 'no ' .. engine .. '-gateway serves the pool ' .. pool .. ': start one with WEFT_POOLS=' .. pool ..
      ', or use the engine local'
  end
  return 'no ' .. engine .. '-gateway serves this namespace: start one (weft up --' .. engine ..
    '), or use the engine local'
end

-- How long a step waits for its engine, in ms: its task's conf, which is in the context, sets it.
local ENGINE_WAIT_SECONDS = 60

local function engine_wait(context)
  local read, found = pcall(cjson.decode, context)
  local seconds = read and type(found) == 'table' and tonumber(found.engine_wait_seconds)
  return (seconds or ENGINE_WAIT_SECONDS) * 1000
end

-- Puts a step on the stream of its engine, where it waits for a gateway as long as the task's conf says. Returns an
-- error (JSON) if none serves the stream and the step may not wait; else nil, and whether the task's output reports
-- the wait.
local function start_engine_step(base, task, child, stream, header, data, context)
  local engine, wait, away = string.match(stream, '^[a-z]+'), engine_wait(context), gateways_of(base, stream) == 0
  if away and wait <= 0 then return error_json('EngineUnavailable', no_gateway(stream)), false end
  redis.call('HSETNX', base .. 'engines', stream, stream)
  context = with_member(context, 'engine_until', string.format('%.3f', (now_ms(base) + wait) / 1000))
  redis.call('XADD', base .. stream, '*', ENTRY.header, header, ENTRY.data, data, ENTRY.context, context)
  if away then
    local key, report = base .. 'task:' .. task,
      '{"waiting":' .. quote(engine) .. ',"reason":' .. quote(no_gateway(stream)) .. '}'
    redis.call('HSET', key, 'seq',
      (publish_pieces(base, task, child, '1', redis.call('HGET', key, 'seq'), '0', {'progress', report}, 1)))
  end
  return nil, away
end
