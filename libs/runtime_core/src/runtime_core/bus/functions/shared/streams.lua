-- Work streams: their groups, the events appended to them, and acknowledgement.

local GROUPS = {agent = 'agent-handler', tool = 'tool-handler', ray = 'ray-gateway', spark = 'spark-gateway'}

local function group_of(stream)
  return GROUPS[stream] or GROUPS[string.match(stream, '^[a-z]+')]
end

-- Whether the stream's deliveries are turns of agents, and not calls.
local function is_agent_stream(stream) return string.sub(stream, 1, 5) == 'agent' end

-- Acknowledges and deletes: a work stream holds only unfinished work. Returns 1 if the entry was not settled before, 0
-- if it was; the acknowledgement alone does not show this, since a lost group has forgotten who has the entry.
local function settle(base, stream, entry)
  local key = base .. stream
  redis.call('XACK', key, group_of(stream), entry)
  return redis.call('XDEL', key, entry)
end

-- The same after other writes. pcall: if another program stores something else there, the entry is gone already.
local function settle_last(base, stream, entry)
  local key = base .. stream
  redis.pcall('XACK', key, group_of(stream), entry)
  redis.pcall('XDEL', key, entry)
end

local function append_resume(base, task, run, stream, agent, key, turn, step, value)
  local header = '1\nresume\n' .. task .. '\n' .. run .. '\n' .. agent .. '\n' .. key .. '\n1\n' .. turn
  return redis.call('XADD', base .. stream, '*', ENTRY.header, header, ENTRY.step, step, ENTRY.data, value)
end

-- Ends the quarantine of an entry and sets its count of deliveries back to 1, unless `keeps_count`: its turn has got
-- further than when its owners died. `stream` is empty if it was delivered once. pcall: a lost group must not stop the
-- write that shows this.
local function clear_deaths(base, owner, stream, entry, keeps_count)
  if stream == '' then return end
  local key, group = base .. stream, group_of(stream)
  local held = redis.pcall('XPENDING', key, group, entry, entry, 1, owner)
  if held.err or not held[1] then return end
  if not keeps_count then redis.pcall('XCLAIM', key, group, owner, 0, entry, 'RETRYCOUNT', 1, 'JUSTID') end
  redis.pcall('HDEL', base .. 'quarantine', stream .. '|' .. entry)
end
