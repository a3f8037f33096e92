-- Stores a dead letter without a delivery: a refused command, or an answer that cannot be written.
-- KEYS 1 base · ARGV 1… the letter's fields: name, value, …
-- RETURNS its id
local function keep_letter(keys, args)
  redis.call('XLEN', keys[1] .. 'dead')
  return dead.keep(keys[1], args)
end
