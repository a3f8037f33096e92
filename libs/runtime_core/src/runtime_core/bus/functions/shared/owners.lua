-- Owners, and whether they are alive.

-- Owners that were alive when a function last looked, by partition. Only `beat` and `leave` remove owners; they remove
-- them here too. A function of another release removes an owner from the set alone, and so does the stream of a master
-- while this server is its replica: until this server restarts, the owner's commits are fenced by the state of their
-- run, and by that alone.
local known_alive = {}

-- For a commit: most owners have committed before.
local function may_commit(base, owner)
  local known = known_alive[base]
  if known and known[owner] then return true end
  if not redis.call('ZSCORE', base .. 'alive', owner) then return false end
  if not known then
    known = {}
    known_alive[base] = known
  end
  known[owner] = true
  return true
end

local function remove_owner(base, owner)
  redis.call('ZREM', base .. 'alive', owner)
  if known_alive[base] then known_alive[base][owner] = nil end
end
