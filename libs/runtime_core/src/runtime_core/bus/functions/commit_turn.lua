-- Commits a turn of an agent in one step: fences, acknowledgement, journal, sends in program order, timers, record,
-- and last the release of the instance.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run · 6 instance (`agent/key`) or ''
--      7 mode: `w` waits, `c` completed, `f` failed · 8 now (epoch ms) · 9 record (JSON steps) or '' · 10 steps in the record
--      11 output, error object or, for `w`, the state in mid-run ('' unchanged) · 12 new state or '' (for `c`)
--      13 number of parts, then each part, its letter first:
--        c stream step name key digest wait data context   ask a tool, an agent or an engine; stream `?agent`, `?tool`, `?ray`, `?spark`: by manifest
--          stream `@<partition>:<task>`: an instance that lives elsewhere is asked by a task of its own there
--        t step digest wait after_ms status payload        a timer that answers the step
--        q step digest wait data timeout_ms ('' none) default ('' none)   a question; data is JSON for `weft.human.requested`
--        s task agent key data step digest                 a message nobody waits for: a task of its own
--        a step wait                                       wait again for a step asked for before
-- RETURNS 'OK' · 'DONE' where the event had been handled or its task is over (settled, nothing else happened)
--         'FENCED' where the owner was declared dead · 'LIMIT <n>' over max steps · both: nothing was written
local PART_SIZE = {c = 9, t = 7, q = 7, s = 7, a = 3}

-- Where what this app lacks goes to: an agent or a tool of another app, an engine's gateway.
local function stream_by_manifest(base, target, name)
  if target == '?agent' then return redis.call('HGET', base .. 'agents', name) end
  if target == '?tool' then return redis.call('HGET', base .. 'tools', name) end
  return redis.call('HGET', base .. 'engines', string.sub(target, 2))
end

local function nobody_serves(target, name)
  local kind = string.sub(target, 2)
  if kind == 'agent' or kind == 'tool' then return 'no ' .. kind .. ' is named ' .. name end
  return 'no ' .. kind .. '-gateway serves this namespace: start one, or use the engine local'
end

local function commit_turn(keys, args)
  local base, stream, entry, task, run, inst = keys[1], args[2], args[3], args[4], args[5], args[6]
  local key = base .. 'task:' .. task
  local rk = run_key(base, task, run)
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return 'FENCED' end
  local v = redis.call('HMGET', key, 'status', 'h', 'steps', 'fl', 'cur', 'u', 'w')
  local cur, turn, own_h, unwritten = v[5], v[6], v[2], v[7]
  if run ~= 'r' then
    local w = redis.call('HMGET', rk, 'cur', 'u', 'h', 'w')
    cur, turn, own_h, unwritten = w[1], w[2], w[3], w[4]
  end
  if cur ~= entry or ENDED[v[1]] then
    if inst ~= '' then check_instance(base, inst, stream) end
    settle_late(base, stream, entry, inst, task, run)
    return 'DONE'
  end
  local steps = tonumber(v[3] or '0') + tonumber(args[10])
  local mode, parts = args[7], tonumber(args[13])

  if mode ~= 'w' then
    local at, ending = 14, nil
    for _ = 1, parts do
      if args[at] == 's' then check_send(base, args[at + 2], args[at + 3]) end
      at = at + PART_SIZE[args[at]]
    end
    if run == 'r' then
      ending = check_end(base, task, own_h, v[4] or '', mode == 'c' and 'completed' or 'failed')
    else
      check_stream(base, 'record')
      check_waiting(base, task, (parent_of(run)))
      if inst ~= '' then check_instance(base, inst, stream) end
    end
    settle(base, stream, entry)
    at = 14
    for _ = 1, parts do
      if args[at] == 's' then
        send_detached(base, args[at + 1], args[at + 2], args[at + 3], args[at + 4], task, run)
      end
      at = at + PART_SIZE[args[at]]
    end
    if inst ~= '' and args[12] ~= '' then
      local busy = redis.call('HGET', base .. 'inst:' .. inst, 'busy')
      if busy and string.find(busy, '\n', 1, true) then
        redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[12])
        local below = string.match(busy, '([^\n]*)\n[^\n]*$')
        local below_task, below_run = string.match(below, '^(.*)|([^|]*)$')
        redis.call('HSET', run_key(base, below_task, below_run), 'ov', args[12])
      else
        redis.call('HSET', base .. 'inst:' .. inst, 'state', args[12])
      end
    end
    if run == 'r' then
      end_task(base, task, ending, v[4] or '', mode == 'c' and 'completed' or 'failed', args[11], text(steps), args[8],
        args[9], false, false)
    else
      redis.call('HSET', key, 'steps', text(steps))
      redis.call('XADD', base .. 'record', '*', 't', task, 'd', args[9])
      end_child(base, task, run, inst, mode == 'c' and 'K' or 'E', args[8], args[11])
    end
    return 'OK'
  end

  if args[9] ~= '' then check_stream(base, 'record') end
  local at, asked = 14, 0
  for _ = 1, parts do
    local letter = args[at]
    local size = PART_SIZE[letter]
    if not size or not args[at + size - 1] then return redis.error_reply('ERR weft: malformed part ' .. tostring(letter)) end
    if letter ~= 'a' then asked = asked + 1 end
    if letter == 'c' then
      local target, kind = args[at + 1], string.sub(args[at + 1], 1, 1)
      if kind == '@' then
        target = 'asks'
      elseif kind == '?' then
        kind = string.sub(target, 2, 2)
        target = stream_by_manifest(base, target, args[at + 3])
      end
      if target then check_stream(base, target) end
      if kind == 'a' then
        redis.call('HLEN', run_key(base, task, run .. '/' .. args[at + 2]))
        if args[at + 4] ~= '' then
          check_instance(base, args[at + 3] .. '/' .. args[at + 4])
          redis.call('HLEN', base .. 'meta')
        end
      end
    elseif letter == 't' or letter == 'q' then
      check_timers(base)
      if letter == 'q' then
        check_stream(base, 'out:' .. task)
        check_stream(base, 'replies')
      end
    elseif letter == 's' then
      check_send(base, args[at + 2], args[at + 3])
    end
    at = at + size
  end
  local limit = tonumber(string.match(v[2], '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n(%d*)') or '0') or 0
  if limit > 0 and steps + asked > limit then return 'LIMIT ' .. text(limit) end
  if inst ~= '' then check_instance(base, inst, stream) end

  settle(base, stream, entry)
  local set, groups, ready = {}, nil, false
  local woke_step, woke_value = '', ''
  local flags = v[4] or ''
  local function missing(step, digest, kind, wait)
    set[#set + 1] = 'm:' .. step
    set[#set + 1] = digest .. kind .. wait
    if wait ~= '!' and wait ~= '0' then
      groups = groups or {}
      groups[wait] = (groups[wait] or 0) + 1
    end
  end
  local function present(step, wait, value)
    if wait == '!' then
      ready, woke_step, woke_value = true, step, value
    elseif wait ~= '0' then
      groups = groups or {}
      groups[wait] = groups[wait] or 0
    end
  end
  at = 14
  for _ = 1, parts do
    local letter = args[at]
    if letter == 'c' then
      local target, step, name, call_key, digest, wait, data, context =
        args[at + 1], args[at + 2], args[at + 3], args[at + 4], args[at + 5], args[at + 6], args[at + 7], args[at + 8]
      local kind = string.sub(target, 1, 1)
      local child, unknown = run .. '/' .. step, nil
      if kind == '@' then
        ask_elsewhere(base, target, name, call_key, data, context, task .. '|' .. run .. '|' .. step)
        redis.call('HSET', key, 'k:' .. child, target)
        flags = flag(flags, 'c')
        missing(step, digest, 'a', wait)
      elseif kind == '?' then
        kind = string.sub(target, 2, 2)
        unknown, target = nobody_serves(target, name), stream_by_manifest(base, target, name)
      end
      if kind == '@' then
        target = nil -- asked above
      elseif not target then
        local value = digest .. 'E' .. args[8] .. error_json('UnknownName', unknown)
        set[#set + 1] = 'j:' .. step
        set[#set + 1] = value
        present(step, wait, value)
      elseif kind == 'a' then
        local ck = run_key(base, task, child)
        local cur_child = deliver(base, task, child, target, name, call_key, data, context, true)
        if cur_child then
          redis.call('HSET', ck, 'cur', cur_child, 'h', target .. '\n' .. name .. '\n' .. call_key .. '\n\n' ..
            (string.find(cur_child, '-', 1, true) and ms_of(cur_child) or args[8]) .. '\n0', 'd', data, 'x', context)
          redis.call('HSET', key, 'k:' .. child, call_key ~= '' and (name .. '/' .. call_key) or '')
          flags = flag(flags, 'c')
          missing(step, digest, kind, wait)
        else
          local value = digest .. 'E' .. args[8] .. mailbox_full(name, call_key)
          set[#set + 1] = 'j:' .. step
          set[#set + 1] = value
          present(step, wait, value)
        end
      else
        local header = '1\ncall\n' .. task .. '\n' .. child .. '\n' .. name .. '\n' .. call_key .. '\n1\n0'
        if context ~= '' then
          redis.call('XADD', base .. target, '*', 'h', header, 'd', data, 'x', context)
        else
          redis.call('XADD', base .. target, '*', 'h', header, 'd', data)
        end
        missing(step, digest, kind, wait)
      end
    elseif letter == 't' then
      local step = args[at + 1]
      local member = 's|' .. task .. '|' .. run .. '|' .. step
      add_timer(base, task, member, now_ms(base) + tonumber(args[at + 4]), args[8])
      if args[at + 5] ~= 'K' or args[at + 6] ~= 'null' then
        redis.call('HSET', base .. 'delayed', member, args[at + 5] .. args[8] .. args[at + 6])
      end
      flags = flag(flags, 'z')
      missing(step, args[at + 2], 'i', args[at + 3])
    elseif letter == 'q' then
      local step = args[at + 1]
      tell_question(base, task, v[2], args[at + 4])
      flags = flag(flags, 'o')
      if args[at + 5] ~= '' then
        local member = 's|' .. task .. '|' .. run .. '|' .. step
        add_timer(base, task, member, now_ms(base) + tonumber(args[at + 5]), args[8])
        local late = 'E' .. args[8] .. error_json('HumanTimeout', 'nobody answered in time')
        if args[at + 6] ~= '' then late = 'K' .. args[8] .. args[at + 6] end
        redis.call('HSET', base .. 'delayed', member, late)
        flags = flag(flags, 'z')
      end
      set[#set + 1] = 'q:' .. step
      set[#set + 1] = args[8] .. args[at + 4]
      missing(step, args[at + 2], 'h', args[at + 3])
    elseif letter == 's' then
      send_detached(base, args[at + 1], args[at + 2], args[at + 3], args[at + 4], task, run)
      set[#set + 1] = 'j:' .. args[at + 5]
      set[#set + 1] = args[at + 6] .. 'K' .. args[8] .. 'null'
    else
      local step, wait = args[at + 1], args[at + 2]
      local known = redis.call('HMGET', rk, 'm:' .. step, 'j:' .. step)
      if known[1] then
        missing(step, string.sub(known[1], 1, 8), string.sub(known[1], 9, 9), wait)
      else
        present(step, wait, known[2] or '')
      end
    end
    at = at + PART_SIZE[letter]
  end
  if groups then
    for name, count in pairs(groups) do
      if count == 0 then ready = true else
        set[#set + 1] = name
        set[#set + 1] = text(count)
      end
    end
  end
  local next_turn = text(tonumber(turn or '0') + 1)
  local now_cur = 'held'
  if ready then
    local own_stream, agent, own_key = target_of(own_h)
    now_cur = resume(base, task, run, own_stream, agent, own_key, next_turn, woke_step, woke_value)
  end
  set[#set + 1] = 'cur'
  set[#set + 1] = now_cur
  set[#set + 1] = 'u'
  set[#set + 1] = next_turn
  if run == 'r' then
    set[#set + 1] = 'status'
    set[#set + 1] = ready and 'running' or 'waiting'
    set[#set + 1] = 'steps'
    set[#set + 1] = text(steps)
    if flags ~= (v[4] or '') then
      set[#set + 1] = 'fl'
      set[#set + 1] = flags
    end
  else
    redis.call('HSET', key, 'steps', text(steps), 'fl', flags)
  end
  -- In pieces: Lua hands over no more than 8,000 values at once.
  for i = 1, #set, 4000 do redis.call('HSET', rk, unpack(set, i, math.min(i + 3999, #set))) end
  if unwritten then redis.call('HDEL', rk, 'w') end
  if args[9] ~= '' then redis.call('XADD', base .. 'record', '*', 't', task, 'd', args[9]) end
  if inst ~= '' then
    if args[11] ~= '' then redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[11]) end
    if now_cur == 'held' and redis.call('LLEN', base .. 'nest:' .. inst) > 0 then
      start_nested(base, inst, redis.call('HGET', base .. 'inst:' .. inst, 'busy'))
    end
  end
  return 'OK'
end
