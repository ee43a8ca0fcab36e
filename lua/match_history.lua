-- match_history(history*; block*) -> {verdict, blocks}
--
-- Find how much of the beginning of a prompt went to each of several targets before. It only reads.
--
-- KEYS  history*  zset  one for each target, at most 256: blocks of prompts that went there, each by the Redis us of the
--                       last time
-- ARGV  block*    the blocks of the prompt, in order
--
-- {'applied', {blocks, ...}}  for each target the number of blocks from the beginning of the prompt

local found = {}
for i, history in ipairs(KEYS) do
  -- A target that has a block has those before it, too, so few blocks have to be looked up.
  local has, lacks = 0, #ARGV + 1
  local at = 1
  while lacks - has > 1 do
    if redis.call('ZSCORE', history, ARGV[at]) then has = at else lacks = at end
    at = math.floor((has + lacks + 1) / 2)
  end
  found[i] = has
end
return {'applied', found}
