-- match_placements(dropped, placement*; fields_max, holder*) -> {verdict, count, matches}
--
-- Find which holders were sent the beginning of a prompt, from the placements of its blocks. It only reads.
--
-- KEYS  dropped     hash  for each dropped holder: the Redis ms by which the placements from before the drop have ended
--       placement*  hash  one for each block of the prompt, in order: until which Redis ms each holder counts as having it
-- ARGV  fields_max  the script stops after reading this many fields, so that no call takes long
--       holder*     the holders that have all blocks before these; none if these begin with the prompt's first block
--
-- {'applied', count, {holder, blocks, ...}}  `count` blocks were read. Of these, each holder has the first `blocks`. A
--                                            holder that has all of them may have further ones.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local most = tonumber(ARGV[1])
local matches = {}
local count, fields = 0, 0

local function report(holder, blocks)
  if blocks > 0 then
    matches[#matches + 1] = holder
    matches[#matches + 1] = blocks
  end
end

-- The ends of the placements of a block at `holders`. A key that is no hash is not ours, and has no holders.
local function ends_of(block, holders)
  if redis.call('TYPE', block).ok ~= 'hash' then return {} end
  return redis.call('HMGET', block, unpack(holders, 1, math.min(#holders, most)))
end

local going = {}
for i = 2, #ARGV do going[i - 1] = ARGV[i] end
if #going == 0 and redis.call('TYPE', KEYS[2]).ok == 'hash' then going = redis.call('HKEYS', KEYS[2]) end

local after = {}
if #going > 0 then
  for i, ends in ipairs(ends_of(KEYS[1], going)) do after[going[i]] = tonumber(ends or '0') end
end
while #going > 0 and count + 1 < #KEYS and fields < most do
  local ends = ends_of(KEYS[count + 2], going)
  local still = {}
  for i, holder in ipairs(going) do
    if (tonumber(ends[i]) or 0) > math.max(now, after[holder] or 0) then
      still[#still + 1] = holder
    else
      report(holder, count)
    end
  end
  fields = fields + #going
  count = count + 1
  going = still
end
for _, holder in ipairs(going) do report(holder, count) end
return {'applied', count, matches}
