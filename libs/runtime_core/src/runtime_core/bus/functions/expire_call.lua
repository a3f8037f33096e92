-- Ends an engine step for which no gateway has come in time: like `commit_call`, but not on a stream that is served.
-- KEYS 1 base · ARGV as `commit_call`
-- RETURNS as `commit_call` · 'SERVED' if a live gateway serves the stream or holds the step: nothing was written
--         · 'DONE' also if the entry is gone
local function expire_call(keys, args)
  local base, stream, entry = keys[1], args[2], args[3]
  if gateways_of(base, stream) > 0 then return 'SERVED' end
  if not redis.call('XRANGE', base .. stream, entry, entry)[1] then return 'DONE' end
  -- Without a group, nobody has taken it.
  local taken = redis.pcall('XPENDING', base .. stream, group_of(stream), entry, entry, 1)[1]
  if taken and redis.call('ZSCORE', base .. 'alive', taken[2]) then return 'SERVED' end
  return commit_call(keys, args)
end
