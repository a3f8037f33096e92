-- Forgets an agent of runtimes that no process runs: its place in the lists, its subscriptions and its work stream. In
-- one step, so that a process that starts meanwhile is either found, or registers the agent afterwards.
-- KEYS 1 base
-- ARGV 1 agent · 2 its name among the manifests · 3 its work stream
--      4 ms without any heartbeat after which no process counts as alive
-- RETURNS {'dropped', now (epoch ms)} · {'runs', number of living processes that read the stream}: nothing was written

-- Living processes that read a stream.
local function readers_of(base, stream, silent_ms)
  local beat_at = redis.call('HGET', base .. 'meta', 'beat_at')
  if not beat_at or server_ms() - tonumber(beat_at) > silent_ms then return 0 end
  local count, consumers = 0, redis.pcall('XINFO', 'CONSUMERS', base .. stream, group_of(stream))
  for _, consumer in ipairs(consumers) do
    if redis.call('ZSCORE', base .. 'alive', consumer[2]) then count = count + 1 end
  end
  return count
end

-- The lines of a field of `topics` that do not name the agent.
local function lines_of_others(field, value, agent)
  local kept = {}
  for _, line in ipairs(lines(value)) do
    local subscriber = field == '^' and string.match(line, '^%S* (.*)$') or line
    if subscriber ~= agent then kept[#kept + 1] = line end
  end
  return kept
end

local function drop_agent(keys, args)
  local base, agent, stream = keys[1], args[1], args[3]
  local running = readers_of(base, stream, tonumber(args[4]))
  if running > 0 then return {'runs', running} end
  local topics = base .. 'topics'
  for _, name in ipairs({'agents', 'manifests', 'interleaved', 'topics'}) do redis.call('HLEN', base .. name) end
  local stored = redis.call('HGETALL', topics)
  for i = 1, #stored, 2 do
    local field, value = stored[i], stored[i + 1]
    if field == '^' or string.sub(field, 1, 1) == '=' then
      local kept = lines_of_others(field, value, agent)
      if #kept == 0 then
        redis.call('HDEL', topics, field)
      else
        redis.call('HSET', topics, field, table.concat(kept, '\n'))
      end
    end
  end
  redis.call('HDEL', topics, '@' .. agent)
  redis.call('HDEL', base .. 'agents', agent)
  redis.call('HDEL', base .. 'manifests', args[2])
  redis.call('HDEL', base .. 'interleaved', agent)
  redis.call('DEL', base .. stream)
  return {'dropped', text(now_ms(base))}
end
