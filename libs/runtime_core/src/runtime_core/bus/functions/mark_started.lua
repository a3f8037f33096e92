-- Marks a call that may not be repeated as started, before it runs. A copy of an entry that was settled meanwhile, and
-- a call whose step has its result or whose task has ended, must not run.
-- KEYS 1 base · ARGV 1 owner · 2 task · 3 run · 4 stream · 5 entry · 6 a word unique to this attempt
-- RETURNS 1 if it may run, 0 if it was started before (its outcome is unknown), 'DONE' if nobody
--         needs it any more, 'FENCED'
local function mark_started(keys, args)
  local base, task = keys[1], args[2]
  if not redis.call('ZSCORE', base .. 'alive', args[1]) then return redis.status_reply('FENCED') end
  local status = redis.call('HGET', base .. 'task:' .. task, 'status')
  if not status or ENDED[status] then return redis.status_reply('DONE') end
  local parent, step = parent_of(args[3])
  if redis.call('HEXISTS', run_key(base, task, parent), RUN.missing .. step) == 0 then
    return redis.status_reply('DONE')
  end
  if #redis.call('XRANGE', base .. args[4], args[5], args[5]) == 0 then return redis.status_reply('DONE') end
  local field, mark = task .. '/' .. args[3], args[1] .. ' ' .. args[6]
  if redis.call('HSETNX', base .. 'started', field, mark) == 1 then return 1 end
  -- The same attempt again: the reply to its first call was lost. Another attempt of the same owner has a different
  -- word.
  return redis.call('HGET', base .. 'started', field) == mark and 1 or 0
end
