-- Dead letters. Every function writes and removes them through `dead`, so that each letter and their sum stay bounded.
--   dead                 the letters: a stream
--   letters              `<task>|<letter>` of the letters that pin a task, by time (ms): a sorted set
--   letters:bytes        bytes by share, and under '' the sum of all shares but `parked`: a hash
--   letters:of:<share>   `<letter>|<bytes>|<task>`, the oldest first: a sorted set
--   letters:trimmed      number of letters trimmed so far by `<cause> <share>`, for metrics: a hash
-- A letter's share is the stream that its delivery came from. When letters exceed the bound, the largest share loses
-- its oldest ones, so a flood trims its own letters and not those of others. pcall: if another program has put
-- something else in the place of these keys, only the counts are lost.

-- A parked run can continue only through its letter. The number of open tasks bounds these letters.
local PARKED = 'parked'

-- Notes that a dead letter of a task is gone. Returns whether another one still pins the task.
local function unpin(key, flags)
  if redis.call('HINCRBY', key, TASK.letters, -1) > 0 then return true end
  redis.call('HDEL', key, TASK.letters)
  if string.find(flags, FLAG.letters, 1, true) then
    redis.call('HSET', key, TASK.flags, (string.gsub(flags, FLAG.letters, '')))
  end
  return false
end

local dead = {}

do
  local HEAD, FIELD_MAX, LETTER_MAX = 4096, 1114112, 2621440
  local FIELDS_MAX, NAME_MAX, ERRORS_MAX = 200, 512, 262144
  -- A letter's cost on the server besides its fields.
  local OVERHEAD = 256
  local DEFAULT_MAX = 67108864
  -- The number of letters that one call may trim. The state-manager trims the rest.
  local TRIM_MAX, BATCH = 1000, 100
  -- Letters that people have added may be of any size.
  local PAGE = 10

  local function share_of(letter)
    local reason, stream
    for i = 1, #letter, 2 do
      if letter[i] == 'reason' then reason = reason or letter[i + 1] end
      if letter[i] == 'stream' then stream = stream or letter[i + 1] end
    end
    if reason == 'diverged' then return PARKED end
    -- Its stream is the `replyto` that a publisher has chosen.
    if reason == 'undeliverable' then return 'replyto' end
    if not stream or stream == '' then return 'none' end
    return (string.gsub(string.sub(stream, 1, 200), '%c', '?'))
  end

  local function weigh(letter)
    local bytes = OVERHEAD
    for i = 1, #letter do bytes = bytes + #letter[i] end
    return bytes
  end

  local function member_of(id, letter)
    local task = ''
    for i = 1, #letter, 2 do
      if letter[i] == 'taskid' then task = letter[i + 1] end
    end
    return id .. '|' .. text(weigh(letter)) .. '|' .. task
  end

  local function add_bytes(base, share, bytes)
    local left = redis.pcall('HINCRBY', base .. 'letters:bytes', share, text(bytes))
    if type(left) == 'number' and left <= 0 then redis.pcall('HDEL', base .. 'letters:bytes', share) end
  end

  local function count(base, share, id, letter)
    if redis.pcall('ZADD', base .. 'letters:of:' .. share, ms_of(id), member_of(id, letter)) ~= 1 then return end
    local bytes = weigh(letter)
    add_bytes(base, share, bytes)
    if share ~= PARKED then add_bytes(base, '', bytes) end
  end

  local function uncount(base, share, member)
    if redis.pcall('ZREM', base .. 'letters:of:' .. share, member) ~= 1 then return 0 end
    local bytes = tonumber(string.match(member, '^[^|]*|(%d+)'))
    add_bytes(base, share, -bytes)
    if share ~= PARKED then add_bytes(base, '', -bytes) end
    return bytes
  end

  -- The newest errors that fit, as JSON. Half of the space stays free, so that few retries need to read all of them.
  function dead.errors(errors)
    if #errors <= ERRORS_MAX then return errors end
    local read, all = pcall(cjson.decode, errors)
    if not read or type(all) ~= 'table' then return '[]' end
    local kept, size, first = {}, 0, #all + 1
    while first > 1 do
      local one = cjson.encode(all[first - 1])
      size = size + #one + 1
      if size > ERRORS_MAX / 2 then break end
      first = first - 1
      table.insert(kept, 1, one)
    end
    if first > 1 then
      table.insert(kept, 1, error_json('LeftOut', text(first - 1) .. ' earlier errors were too long to keep'))
    end
    return '[' .. table.concat(kept, ',') .. ']'
  end

  -- The letter with its fields, names and values bounded. `cut` says what is missing.
  local function bounded(letter)
    local kept, cut, total, all, left_out = {}, {}, 0, 0, 0
    local function shorten(at)
      local name, value = kept[at], kept[at + 1]
      cut[#cut + 1] = quote(name) .. ':{"bytes":' .. text(#value) .. ',"sha1":"' .. redis.sha1hex(value) .. '"}'
      kept[at + 1] = string.sub(value, 1, HEAD)
      total = total - #value + #kept[at + 1]
    end
    for i = 1, #letter, 2 do
      local name, value = letter[i], letter[i + 1]
      if name == 'errors' then value = dead.errors(value) end
      all = all + #name + #value
      -- The sender may have cut fields already, and one more field says so.
      if #name > NAME_MAX or (#kept >= 2 * FIELDS_MAX and name ~= 'cut') then
        left_out = left_out + 1
      else
        kept[#kept + 1] = name
        kept[#kept + 1] = value
        total = total + #name + #value
        -- The sender bounds an event's data: a structured event may be larger.
        if #value > FIELD_MAX and name ~= 'event:data' then shorten(#kept - 1) end
      end
    end
    while total > LETTER_MAX do
      local largest = 1
      for i = 1, #kept, 2 do
        if #kept[i + 1] > #kept[largest + 1] then largest = i end
      end
      shorten(largest)
    end
    if #cut > 0 or left_out > 0 then
      kept[#kept + 1] = 'cut'
      kept[#kept + 1] = '{"bytes":' .. text(all) .. ',"fields":{' .. table.concat(cut, ',') .. '},"left_out":' ..
        text(left_out) .. '}'
    end
    return kept
  end

  -- A trimmed letter no longer pins its task.
  local function release_task(base, task, id)
    if redis.pcall('ZREM', base .. 'letters', task .. '|' .. id) ~= 1 then return end
    local key = base .. 'task:' .. task
    local v = redis.pcall('HMGET', key, 'status', TASK.flags)
    if type(v[1]) ~= 'string' or unpin(key, v[2] or '') or not ENDED[v[1]] then return end
    drop_children(base, task)
    local retention = redis.pcall('HGET', base .. 'meta', 'retention')
    redis.call('EXPIRE', key, type(retention) == 'string' and retention or '3600')
  end

  -- Trims the letters of a share's `members`. Returns how many existed: somebody may have deleted some by hand.
  local function trim_share(base, share, members, cause)
    local ids, freed = {}, 0
    for i, member in ipairs(members) do
      local id, bytes, task = string.match(member, '^([^|]*)|(%d+)|(.*)$')
      ids[i], freed = id, freed + tonumber(bytes)
      if task ~= '' then release_task(base, task, id) end
    end
    local there = redis.call('XDEL', base .. 'dead', unpack(ids))
    if there > 0 then redis.pcall('HINCRBY', base .. 'letters:trimmed', cause .. ' ' .. share, there) end
    redis.call('ZREM', base .. 'letters:of:' .. share, unpack(members))
    add_bytes(base, share, -freed)
    if share ~= PARKED then add_bytes(base, '', -freed) end
    return there
  end

  -- Trims letters until `size` more bytes of `share` fit. Returns how many it has trimmed.
  function dead.make_room(base, share, size)
    local most = tonumber(redis.pcall('HGET', base .. 'meta', 'dead_max') or '') or DEFAULT_MAX
    local total = (tonumber(redis.pcall('HGET', base .. 'letters:bytes', '') or '') or 0) + size
    if total <= most or share == PARKED then return 0 end
    local flat, shares, trimmed = redis.pcall('HGETALL', base .. 'letters:bytes'), {}, 0
    for i = 1, #flat, 2 do
      if flat[i] ~= '' and flat[i] ~= PARKED then shares[flat[i]] = tonumber(flat[i + 1]) end
    end
    if size > 0 then shares[share] = (shares[share] or 0) + size end
    while total > most and trimmed < TRIM_MAX do
      local largest, next_largest = nil, 0
      for name, bytes in pairs(shares) do
        if not largest or bytes > shares[largest] or (bytes == shares[largest] and name < largest) then
          largest, next_largest = name, largest and shares[largest] or 0
        elseif bytes > next_largest then
          next_largest = bytes
        end
      end
      if not largest then break end
      local members = {}
      for _, member in ipairs(redis.pcall('ZRANGE', base .. 'letters:of:' .. largest, 0, BATCH - 1)) do
        if total <= most or (#members > 0 and shares[largest] < next_largest) then break end
        members[#members + 1] = member
        local bytes = tonumber(string.match(member, '^[^|]*|(%d+)'))
        total, shares[largest] = total - bytes, shares[largest] - bytes
      end
      if #members > 0 then
        trimmed = trimmed + trim_share(base, largest, members, 'bytes')
      else
        -- Its only letter is the new one.
        shares[largest] = nil
      end
    end
    return trimmed
  end

  -- Writes a letter. The caller has checked that `dead` is a stream. Returns the letter's id.
  function dead.keep(base, letter)
    letter = bounded(letter)
    local share = share_of(letter)
    -- Trim first, so that a letter is never trimmed before its caller has pinned its task.
    dead.make_room(base, share, weigh(letter))
    local id = redis.call('XADD', base .. 'dead', '*', unpack(letter))
    count(base, share, id, letter)
    return id
  end

  -- Removes a letter that was redriven, dropped or erased.
  function dead.forget(base, id, letter)
    redis.call('XDEL', base .. 'dead', id)
    uncount(base, share_of(letter), member_of(id, letter))
  end

  local function waits(base, id)
    local found = redis.call('XRANGE', base .. 'dead', id, id)[1]
    if not found then return false end
    local named = {}
    for i = 1, #found[2], 2 do named[found[2][i]] = found[2][i + 1] end
    if not named.taskid or not named.runid then return false end
    local status = redis.pcall('HGET', base .. 'task:' .. named.taskid, 'status')
    return type(status) == 'string' and not ENDED[status] and
      redis.pcall('HGET', run_key(base, named.taskid, named.runid), RUN.current) == 'park'
  end

  -- Trims letters that were written before `before` (ms). Returns how many it has trimmed.
  function dead.trim_old(base, before, now)
    local shares, trimmed, looks = redis.pcall('HKEYS', base .. 'letters:bytes'), 0, 0
    for _, share in ipairs(shares) do
      local key = base .. 'letters:of:' .. share
      while share ~= '' and looks < TRIM_MAX do
        local old = redis.pcall('ZRANGEBYSCORE', key, '-inf', '(' .. text(before), 'LIMIT', 0, BATCH)
        local members = {}
        for _, member in ipairs(old) do
          if share == PARKED and waits(base, string.match(member, '^[^|]*')) then
            -- Check again when another retention has passed.
            redis.call('ZADD', key, text(now), member)
          else
            members[#members + 1] = member
          end
        end
        if #old == 0 then break end
        looks = looks + #old
        if #members > 0 then trimmed = trimmed + trim_share(base, share, members, 'age') end
      end
    end
    return trimmed
  end

  -- Recounts letters, a page from `start` on. Returns where to continue, or '' at the end.
  function dead.recount(base, start)
    if start == '-' then
      for _, share in ipairs(redis.pcall('HKEYS', base .. 'letters:bytes')) do
        if share ~= '' then redis.call('DEL', base .. 'letters:of:' .. share) end
      end
      redis.call('DEL', base .. 'letters:bytes')
    end
    local page = redis.call('XRANGE', base .. 'dead', start, '+', 'COUNT', PAGE)
    for _, entry in ipairs(page) do
      local share = share_of(entry[2])
      local known = redis.pcall('HEXISTS', base .. 'letters:bytes', share)
      if known == 0 then redis.call('DEL', base .. 'letters:of:' .. share) end
      count(base, share, entry[1], entry[2])
    end
    return #page == PAGE and '(' .. page[#page][1] or ''
  end

  -- How many letters are counted: as many as the stream holds, unless somebody has bypassed Weft to write or remove
  -- some.
  function dead.counted(base)
    local all = 0
    for _, share in ipairs(redis.pcall('HKEYS', base .. 'letters:bytes')) do
      local n = share ~= '' and redis.pcall('ZCARD', base .. 'letters:of:' .. share)
      if type(n) == 'number' then all = all + n end
    end
    return all
  end
end
