-- add_counts(counts, seen, writer; number, count#2, prefix*) -> {verdict, prefixes}
--
-- Add what a replica has counted since its last call to the counts of the fleet.
--
-- KEYS  counts  hash    numbers by name
--       seen    string  HyperLogLog of the prefix keys of decisions
--       writer  string, PX  the number of the last call of this replica
-- ARGV  number   of this call; a repeated call, whose reply was lost, has the same number
--       count    how many, then name and increase of each
--       prefix*  prefix keys, in hex
--
-- {'applied', prefixes}   added; `prefixes` is the approximate number of distinct prefix keys so far
-- {'repeated', prefixes}  the same call added them before

-- Longer than a replica repeats a call.
local KEPT_MILLISECONDS = 3600000

if redis.call('GET', KEYS[3]) == ARGV[1] then return {'repeated', redis.call('PFCOUNT', KEYS[2])} end
local last = 2 + 2 * tonumber(ARGV[2])
for i = 3, last, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = last + 1, #ARGV do redis.call('PFADD', KEYS[2], ARGV[i]) end
redis.call('SET', KEYS[3], ARGV[1], 'PX', KEPT_MILLISECONDS)
return {'applied', redis.call('PFCOUNT', KEYS[2])}
