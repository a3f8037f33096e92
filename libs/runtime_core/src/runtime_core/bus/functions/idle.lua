-- Returns the amount of open work: entries on work streams, tasks that wait for their tenants' turns or for slots of
-- limits, retries, requests and answers on their way to other partitions. A run that waits for a timer or a person does
-- not count, nor does a run in a mailbox behind it.
-- KEYS 1 base
-- RETURNS {amount of work, a text that changes whenever anything is appended}
local function idle(keys)
  local base = keys[1]
  local streams, open, marks = {agent = true, tool = true, ray = true, spark = true, asks = true, replies = true}, 0, {}
  for _, hash in ipairs({'agents', 'tools', 'engines'}) do
    for _, stream in ipairs(redis.call('HVALS', base .. hash)) do streams[stream] = true end
  end
  for stream in pairs(streams) do
    open = open + redis.call('XLEN', base .. stream)
    if redis.call('EXISTS', base .. stream) == 1 then
      local info = redis.call('XINFO', 'STREAM', base .. stream)
      for i = 1, #info, 2 do
        if info[i] == 'last-generated-id' then marks[#marks + 1] = stream .. info[i + 1] end
      end
    end
  end
  for _, member in ipairs(redis.call('ZRANGE', base .. 'timers', 0, -1)) do
    if string.sub(member, 1, 2) == 'e|' then open = open + 1 end
  end
  open = open + tonumber(redis.call('HGET', base .. 'meta', 'queued') or '0')
  open = open + redis.call('HLEN', base .. 'waiting')
  table.sort(marks)
  return {open, table.concat(marks, ' ')}
end
