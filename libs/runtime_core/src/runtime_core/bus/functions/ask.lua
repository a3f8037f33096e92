-- Makes calls in mid-turn, and the turn continues: for code that cannot return to a commit while it waits. A repeat
-- starts nothing twice: a finished step is answered immediately, and the result of a missing one goes to the new
-- caller.
-- KEYS 1 base
-- ARGV 1 owner · 2 entry · 3 task · 4 run · 5 instance (`agent/key`) or '' · 6 now (epoch ms)
--      7 name of the reply stream (`reply:<name>`) that gets each result
--      8 state in the middle of the run, or '' if it is unchanged
--      9 stream of an entry that was delivered again, else ''
--      10 the newest step that this turn has requested or sent, or '' · 11 the newest one whose answer it has, or ''
--      12 number of parts, then each part as `commit_turn` describes it: c, s and p
-- RETURNS {'OK', then of each call that already has its result: step, journal value, and the instance's state if a
--         nested run has changed it since, or ''} · {'DONE'} if the turn is no longer this entry's · {'FENCED'}
--         · {'LIMIT', n} over max steps · {'LOST'} if the server has lost one of the turn's steps: in these four cases
--         nothing was written

local FIRST_PART = 13
-- How often waits clear the deaths of a run. This bounds how often code that kills its process while it waits may do so
-- beside others.
local MOST_WAITS = 100
local ASKABLE = {[PART.call] = true, [PART.message] = true, [PART.publish] = true}

-- Reads every key that the parts are about to write. Returns how many there are, or nil and an error for a malformed
-- one.
local function check_asked(base, args, task, run)
  local at = FIRST_PART
  for _ = 1, tonumber(args[12]) do
    local letter = args[at]
    local size = ASKABLE[letter] and PART_SIZE[letter]
    if not size or not args[at + size - 1] then return nil, malformed_part(letter) end
    if letter == PART.call then check_call(base, args, at, task, run) else check_sent(base, args, at) end
    at = at + size
  end
  return tonumber(args[12])
end

local function add_answer(turn, step, value, state)
  local n = #turn.answers
  turn.answers[n + 1], turn.answers[n + 2], turn.answers[n + 3] = step, value, state or ''
end

-- Starts a call that the run has not made before.
local function call_now(base, args, turn, at)
  local task, run, now, rk = args[3], args[4], args[6], turn.run_key
  local target, step, name, call_key = args[at + 1], args[at + 2], args[at + 3], args[at + 4]
  local digest, data = args[at + 5], args[at + 7]
  local kept = keeps_children(turn.flags)
  local kind, failed, has_child, has_output, waits = start_call(base, task, run, step, target, name, call_key, data,
    args[at + 8], now, turn, kept and digest)
  if has_child then turn.flags = flag(turn.flags, FLAG.children) end
  if has_output then turn.flags = flag(turn.flags, FLAG.output) end
  if waits then turn.flags = flag(turn.flags, FLAG.timers) end
  if kind then
    redis.call('HSET', rk, RUN.missing .. step, digest .. kind .. turn.wait)
    turn.opened, turn.waits = turn.opened + 1, true
    return
  end
  record_refused(base, task, turn.flags, run .. '/' .. step, target, name, call_key, data, now, failed)
  redis.call('HINCRBY', turn.key, 'steps', 1)
  local value = digest .. RESULT.error .. now .. failed
  redis.call('HSET', rk, RUN.result .. step, value)
  add_answer(turn, step, value)
end

local function ask_part(base, args, turn, at)
  local letter, rk = args[at], turn.run_key
  local last = at + PART_SIZE[letter] - 1
  local step = letter == PART.call and args[at + 2] or args[last - 1]
  local known = redis.call('HMGET', rk, RUN.result .. step, RUN.missing .. step, RUN.override_from .. step)
  if letter ~= PART.call then
    if not known[1] then
      send_part(base, args, at, args[3], args[4], turn)
      redis.call('HSET', rk, RUN.result .. step, args[last] .. RESULT.ok .. args[6] .. 'null')
    end
  elseif known[1] then
    add_answer(turn, step, known[1], known[3])
  elseif known[2] then
    turn.waits = true
    if string.sub(wait_of(known[2]), 1, 1) ~= WAKES.by_reply then turn.opened = turn.opened + 1 end
    redis.call('HSET', rk, RUN.missing .. step, digest_of(known[2]) .. kind_of(known[2]) .. turn.wait)
  else
    call_now(base, args, turn, at)
  end
end

-- Whether the run has made all of these requests before: then its state is on the broker, as nested runs have left it.
local function asked_before(rk, args)
  local at = FIRST_PART
  for _ = 1, tonumber(args[12]) do
    local size = PART_SIZE[args[at]]
    local step = args[at] == PART.call and args[at + 2] or args[at + size - 2]
    local known = redis.call('HMGET', rk, RUN.result .. step, RUN.missing .. step)
    if not known[1] and not known[2] then return false end
    at = at + size
  end
  return true
end

-- Whether the server has lost a step of the turn with its last writes. What the turn requests next may depend on an
-- answer that nobody has now, and a request back into the instance would find a state from before the lost one.
local function lacks_asked(args, own)
  return args[10] ~= '' and not own[2] and not own[3] or args[11] ~= '' and not own[4]
end

-- Clears the deaths of a turn that was delivered again and waits now: it has not killed its owner so far, and a
-- quarantined one may wait for this process. Once the answers are recorded, a replay reaches the code after them
-- without a wait, so a death there counts.
local function survive_by_wait(base, args, turn)
  if args[9] == '' or not turn.waits then return end
  local cleared = redis.call('HINCRBY', turn.run_key, RUN.cleared_by_waits, 1)
  clear_deaths(base, args[1], args[9], args[2], cleared > MOST_WAITS)
end

local function ask(keys, args)
  local base, task, run, inst = keys[1], args[3], args[4], args[5]
  local key, rk = base .. 'task:' .. task, run_key(base, task, run)
  if not may_commit(base, args[1]) then return {'FENCED'} end
  local v = redis.call('HMGET', key, 'status', RUN.header, 'steps', TASK.flags)
  local own = redis.call('HMGET', rk, RUN.current, RUN.missing .. args[10], RUN.result .. args[10],
    RUN.result .. args[11], RUN.header, RUN.asks_in_turn)
  if own[1] ~= args[2] or not v[1] or ENDED[v[1]] then return {'DONE'} end
  if lacks_asked(args, own) then return {'LOST'} end
  local asked, malformed = check_asked(base, args, task, run)
  if malformed then return malformed end
  if inst ~= '' then check_instance(base, inst, (target_of(own[5]))) end
  check_record(base, task, v[4] or '')
  local limit = max_steps_of(v[2])
  if limit > 0 and tonumber(v[3] or '0') + asked > limit then return {'LIMIT', text(limit)} end

  local turn = {
    key = key, run_key = rk, flags = v[4] or '', wait = WAKES.by_reply .. args[7], answers = {'OK'}, opened = 0}
  if inst ~= '' and args[8] ~= '' and not asked_before(rk, args) then
    redis.call('HSET', base .. 'inst:' .. inst, INSTANCE.working_state, args[8])
  end
  -- Before the calls: one of them may come back to this instance, and must not wait for this turn.
  if not own[6] then redis.call('HSET', rk, RUN.asks_in_turn, '1') end
  local at = FIRST_PART
  for _ = 1, asked do
    ask_part(base, args, turn, at)
    at = at + PART_SIZE[args[at]]
  end
  survive_by_wait(base, args, turn)
  if turn.waiting then QUEUE.flush(base, turn) end
  if turn.flags ~= (v[4] or '') then redis.call('HSET', key, TASK.flags, turn.flags) end
  local open = redis.call('HINCRBY', rk, RUN.open_asks, turn.opened)
  -- This turn waits now, so a callback that came in before is nested on it.
  if inst ~= '' and open > 0 and redis.call('LLEN', base .. 'nest:' .. inst) > 0 then
    local busy = redis.call('HGET', base .. 'inst:' .. inst, INSTANCE.holders)
    if busy and top_of(busy) == task .. '|' .. run then start_nested(base, inst, busy) end
  end
  return turn.answers
end
