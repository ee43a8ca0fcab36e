-- keep_decisions(decisions ; length, keep_ms, entry*) -> {verdict, 0}
--
-- Add decisions, and outcomes of earlier ones, to the kept decisions of a group. Without entries, only trim.
--
-- KEYS  decisions  stream  kept decisions. Old entries are trimmed, and the key expires a while after its last entry
-- ARGV  length     about how many entries are kept
--       keep_ms    how long an entry is kept
--       entry*     pairs of a name, `decision` or `outcome`, and a JSON object; at most 100 pairs
--
-- {'applied', 0}   added, and trimmed

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV, 2 do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', ARGV[i], ARGV[i + 1])
end
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-0', now - ARGV[2]))
if #ARGV > 2 then redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', now + ARGV[2])) end
return {'applied', 0}
