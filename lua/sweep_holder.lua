-- sweep_holder(engine, block*, dead; holder, engine_hash*) -> {verdict, blocks}
--
-- Remove a dead holder from a bounded number of its blocks on one shard.
--
-- KEYS  engine        hash    the dead holder's engine hashes on this shard
--       block*        string  blocks its entries name; none: all are done, what is left of `engine` goes
--       dead          set     holder ids still to be swept; only on the shard that has it (shard 0), else absent
-- ARGV  holder        its id
--       engine_hash*  the entry of each block*
--
-- {'applied', blocks}  so many of the blocks are done, from the first; less than all of them where 32 KiB of
--                      values were read: call again with the rest
-- {'gone', 0}          the holder is not in `dead`: it was swept, or this Redis came back empty; nothing written

local VALUE_BYTES = 32768

local blocks, id = #ARGV - 1, ARGV[1]
local dead = KEYS[blocks + 2]
if dead and redis.call('SISMEMBER', dead, id) == 0 then return {'gone', 0} end

if blocks == 0 then
  redis.call('UNLINK', KEYS[1])
  return {'applied', 0}
end

-- The value without the holder, '' where it was the only one; false where it is not there. Found as text: of 800 ids,
-- that costs Redis a fraction of looking at each.
local function take(value)
  local text = ' ' .. value .. ' '
  local first, last = text:find(' ' .. id .. ' ', 1, true)
  if not first then return false end
  local before, after = text:sub(2, first - 1), text:sub(last + 1, -2)
  if before == '' or after == '' then return before .. after end
  return before .. ' ' .. after
end

local done, bytes_read, without = 0, 0, {}
while done < blocks and bytes_read <= VALUE_BYTES do
  local to = math.min(done + 16, blocks)
  local values = redis.call('MGET', unpack(KEYS, 2 + done, 1 + to))
  local empty, rest = {}, {}
  for i, value in ipairs(values) do
    if value then
      bytes_read = bytes_read + #value
      if without[value] == nil then without[value] = take(value) end
      if without[value] == '' then
        empty[#empty + 1] = KEYS[1 + done + i]
      elseif without[value] then
        rest[#rest + 1] = KEYS[1 + done + i]
        rest[#rest + 1] = without[value]
      end
    end
  end
  if #rest > 0 then redis.call('MSET', unpack(rest)) end
  if #empty > 0 then redis.call('DEL', unpack(empty)) end
  redis.call('HDEL', KEYS[1], unpack(ARGV, 2 + done, 1 + to))
  done = to
end
return {'applied', done}
