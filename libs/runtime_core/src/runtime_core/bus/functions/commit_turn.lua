-- Commits a turn of an agent in one step: fences, acknowledgement, journal, sends in program order, timers, record,
-- and last the release of the instance.
-- KEYS 1 base
-- ARGV 1 owner · 2 stream · 3 entry · 4 task · 5 run · 6 instance (`agent/key`) or ''
--      7 mode: `w` waits, `c` completed, `f` failed, `k` failed and, for a task's first run, the task is cancelled, `x` the task fails (over a limit) · 8 now (epoch ms) · 9 record (JSON steps) or '' · 10 steps in the record
--      11 output, error object or, for `w`, the state in mid-run ('' unchanged) · 12 new state or '' (for `c`)
--      13 number of parts, then each part, its letter first:
--        c stream step name key digest wait data context   ask a tool, an agent or an engine; stream `?agent`, `?tool`: by manifest
--          stream `@<partition>:<task>`, `@<partition>:<task>:<ms>` with a time limit of its own: an instance that lives
--          elsewhere is asked by a task of its own there
--        t step digest wait after_ms status payload        a timer that answers the step
--        q step digest wait data timeout_ms ('' none) default ('' none)   a question; data is JSON for `weft.human.requested`
--        s task agent key data context step digest         a message nobody waits for: a task of its own
--        p id topic key data context sender step digest    a message to all who have subscribed to the topic
--        a step wait                                       wait again for a step asked for before
--        l traceparent                                     the span of the turn that ends the run: not for `w`
--        u step digest usage                               what was used (JSON: names to numbers, `models` by model)
-- RETURNS 'OK' · 'DONE' where the event had been handled or its task is over (settled, nothing else happened)
--         'FENCED' where the owner was declared dead · 'LIMIT <why>' over a limit of the task · both: nothing was written
local END_OF = {c = 'completed', f = 'failed', k = 'cancelled', x = 'failed'}

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
  local flags = v[4] or ''
  local at, used, answered_by = 14, nil, nil
  for _ = 1, parts do
    local size = PART_SIZE[args[at]]
    if not size or not args[at + size - 1] then return redis.error_reply('ERR weft: malformed part ' .. tostring(args[at])) end
    if args[at] == 'u' then
      used = used or {}
      used[#used + 1] = args[at + 3]
    elseif args[at] == 'l' then
      answered_by = args[at + 1]
    end
    at = at + size
  end
  local usage
  if used then
    local held = redis.call('HMGET', key, 'us', 'lim')
    usage = usage_with(held[1], used)
    local over = (mode == 'w' or mode == 'c') and over_limit(usage, held[2])
    if over then return 'LIMIT ' .. over end
    flags, usage = flag(flags, 'u'), cjson.encode(usage)
  end

  if mode ~= 'w' then
    local ending
    at = 14
    for _ = 1, parts do
      check_sent(base, args, at)
      at = at + PART_SIZE[args[at]]
    end
    if run == 'r' or mode == 'x' then
      ending = check_end(base, task, v[2], flags, END_OF[mode])
      -- A step in another partition, which this task answers, is told who has answered it.
      if run == 'r' and string.sub(ending.head.to, 1, 1) == '@' then ending.by = answered_by end
      if run == 'r' then ending.unwritten, ending.row = nil, true end
      if run ~= 'r' and inst ~= '' then check_instance(base, inst, stream) end
    else
      check_record(base, task, flags)
      check_waiting(base, task, (parent_of(run)))
      if inst ~= '' then check_instance(base, inst, stream) end
    end
    settle(base, stream, entry)
    -- The turn's own rows are in its record.
    if unwritten then redis.call('HDEL', rk, 'w') end
    if usage then redis.call('HSET', key, 'us', usage, 'fl', flags) end
    at = 14
    for _ = 1, parts do
      send_part(base, args, at, task, run)
      at = at + PART_SIZE[args[at]]
    end
    if inst ~= '' and args[12] ~= '' then
      local busy = redis.call('HGET', base .. 'inst:' .. inst, 'busy')
      if busy and string.find(busy, '\n', 1, true) and interleaves(base, string.match(inst, '^[^/]*')) then
        redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[12], 'state', args[12])
      elseif busy and string.find(busy, '\n', 1, true) then
        redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[12])
        local below = string.match(busy, '([^\n]*)\n[^\n]*$')
        local below_task, below_run = string.match(below, '^(.*)|([^|]*)$')
        redis.call('HSET', run_key(base, below_task, below_run), 'ov', args[12])
      else
        redis.call('HSET', base .. 'inst:' .. inst, 'state', args[12])
      end
    end
    if mode == 'x' then
      end_over_limit(base, task, run, inst, ending, flags, args[11], text(steps), args[8], args[9], v[5])
    elseif run == 'r' then
      end_task(base, task, ending, flags, END_OF[mode], args[11], text(steps), args[8], args[9], false, false)
    else
      redis.call('HSET', key, 'steps', text(steps))
      record_rows(base, task, flags, args[9])
      if answered_by then note_answer(base, task, run, answered_by) end
      end_child(base, task, run, inst, mode == 'c' and 'K' or 'E', args[8], args[11])
    end
    return 'OK'
  end

  check_record(base, task, flags)
  local asked = 0
  at = 14
  for _ = 1, parts do
    local letter = args[at]
    if letter ~= 'a' and letter ~= 'u' then asked = asked + 1 end
    if letter == 'c' then
      check_call(base, args, at, task, run)
    elseif letter == 't' or letter == 'q' then
      check_timers(base)
      if letter == 'q' then
        check_stream(base, 'out:' .. task)
        check_stream(base, 'replies')
      end
    else
      check_sent(base, args, at)
    end
    at = at + PART_SIZE[letter]
  end
  local limit = tonumber(string.match(v[2], '^[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n[^\n]*\n(%d*)') or '0') or 0
  if limit > 0 and steps + asked > limit then
    return 'LIMIT the task would take more than max_steps=' .. text(limit) .. ' steps'
  end
  if inst ~= '' then check_instance(base, inst, stream) end

  settle(base, stream, entry)
  local set, groups, ready = {}, nil, false
  local woke_step, woke_value = '', ''
  local reopened = string.find(flags, 'e', 1, true)
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
      local step, digest, wait = args[at + 2], args[at + 5], args[at + 6]
      local kind, failed, child, told = start_call(base, task, run, step, args[at + 1], args[at + 3], args[at + 4],
        args[at + 7], args[at + 8], args[8], reopened and digest)
      if child then flags = flag(flags, 'c') end
      if told then flags = flag(flags, 'o') end
      if kind then missing(step, digest, kind, wait) else
        record_refused(base, task, flags, run .. '/' .. step, args[at + 1], args[at + 3], args[at + 4], args[at + 7],
          args[8], failed)
        steps = steps + 1
        local value = digest .. 'E' .. args[8] .. failed
        set[#set + 1] = 'j:' .. step
        set[#set + 1] = value
        present(step, wait, value)
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
      tell_question(base, task, v[2], args[at + 4], trace_of(base, task, v[4]))
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
    elseif letter == 's' or letter == 'p' then
      send_part(base, args, at, task, run)
      local size = PART_SIZE[letter]
      set[#set + 1] = 'j:' .. args[at + size - 2]
      set[#set + 1] = args[at + size - 1] .. 'K' .. args[8] .. 'null'
    elseif letter == 'u' then
      set[#set + 1] = 'j:' .. args[at + 1]
      set[#set + 1] = args[at + 2] .. 'K' .. args[8] .. 'null'
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
  if unwritten then redis.call('HDEL', rk, 'w', 'by') end
  if usage then redis.call('HSET', key, 'us', usage) end
  if args[9] ~= '' then record_rows(base, task, flags, args[9]) end
  if inst ~= '' then
    if args[11] ~= '' then redis.call('HSET', base .. 'inst:' .. inst, 'ws', args[11]) end
    if now_cur == 'held' and redis.call('LLEN', base .. 'nest:' .. inst) > 0 then
      start_nested(base, inst, redis.call('HGET', base .. 'inst:' .. inst, 'busy'))
    end
  end
  return 'OK'
end
