-- Parts of a commit: a turn's messages and calls. `commit_turn.lua` describes each part.

-- The letter with which each kind of part begins.
local PART = {
  call = 'c', timer = 't', question = 'q', message = 's', publish = 'p', again = 'a', usage = 'u', answered_by = 'l',
  journaled = 'j', withdraw = 'w', receive = 'm', release = 'r', acquire = 'k', version = 'v',
}

-- Number of arguments of a part, including its letter.
local PART_SIZE = {c = 9, t = 5, q = 7, s = 8, p = 9, a = 3, u = 4, l = 2, j = 2, w = 2, m = 7, r = 4, k = 4, v = 2}

local function malformed_part(letter) return redis.error_reply('ERR weft: malformed part ' .. tostring(letter)) end

-- A part that sends a message that nobody waits for.
local function check_sent(base, args, at)
  if args[at] == PART.message then
    check_send(base, args[at + 2], args[at + 3])
  elseif args[at] == PART.publish then
    check_publish(base, args[at + 2], args[at + 3], args[at + 6])
  end
end

local function send_part(base, args, at, task, run, turn)
  if args[at] == PART.message then
    send_detached(base, args[at + 1], args[at + 2], args[at + 3], args[at + 4], args[at + 5], task, run, turn)
  elseif args[at] == PART.publish then
    publish_message(base, args[at + 1], args[at + 2], args[at + 3], args[at + 4], args[at + 5], args[at + 6], task, run)
  end
end

-- A part that calls an agent, a tool or an engine.
local function check_call(base, args, at, task, run)
  local target, kind = args[at + 1], string.sub(args[at + 1], 1, 1)
  if kind == '@' then
    redis.call('ZCARD', base .. 'requests')
    redis.call('HLEN', base .. 'meta')
    target = 'asks'
  elseif kind == '?' then
    kind = string.sub(target, 2, 2)
    target = stream_by_manifest(base, target, args[at + 3])
  end
  if target then check_stream(base, target) end
  if kind == KIND.ray or kind == KIND.spark then
    redis.call('HLEN', base .. 'engines')
    redis.call('ZCARD', base .. 'gateways')
    redis.call('HLEN', base .. 'meta')
    check_stream(base, 'out:' .. task)
  end
  if kind == KIND.agent then
    redis.call('HLEN', run_key(base, task, run .. '/' .. args[at + 2]))
    if args[at + 4] ~= '' then
      check_instance(base, args[at + 3] .. '/' .. args[at + 4])
      redis.call('HLEN', base .. 'meta')
    end
  end
end
