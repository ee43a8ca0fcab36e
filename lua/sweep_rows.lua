-- sweep_rows(engine, row*, piece*, branches, dead?; holder, rows, field*) -> {verdict, rows, blocks}
--
-- Remove a dead holder from a bounded number of rows on one shard.
--
-- KEYS  engine    hash    the dead holder's engine hashes on this shard
--       row*      string  rows, branch rows and singles that its fields name
--       piece*    string  for each of the branch rows, the row of its piece
--       branches  hash    head to number of branch rows
--       dead      set     holder ids still to be swept; only on the shard that has it (shard 0), else absent
-- ARGV  holder    its id
--       rows      the number of row*
--       field*    the field of each row*; the field of a branch row is `<head>:<key>`
--
-- {'applied', rows, blocks}  the first `rows` rows are done, and the holder had `blocks` blocks there. If these are not
--                            all rows, 32 KiB of values were read: call again with the others
-- {'gone', 0, 0}             the holder is not in `dead`: it was swept, or this Redis came back empty. Or this shard has not
--                            begun to sweep it (end_holder), or has lost that in a failover; nothing written

local BYTES = 32768

local id, count = ARGV[1], tonumber(ARGV[2])
local dead = KEYS[#KEYS]:sub(-9) ~= ':branches' and KEYS[#KEYS] or nil
local branches = dead and KEYS[#KEYS - 1] or KEYS[#KEYS]
if dead and redis.call('SISMEMBER', dead, id) == 0 then return {'gone', 0, 0} end
-- The end of the holder is known on shard 0 only, which may have lost it since it was asked. Here this mark shows it.
if redis.call('HGET', KEYS[1], 'applied') ~= '9007199254740991 0' then return {'gone', 0, 0} end

local kept, gone, left = {}, {}, {} -- keys and values to write; keys to delete; by head: its row, and deleted branch rows
local done, bytes_read, piece, portion, blocks = 0, 0, 1 + count, 4, 0

local BITS = {} -- how many bits a hex digit has
for i, bits in ipairs({0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4}) do BITS[string.format('%x', i - 1)] = bits end

-- The value without the holder; '' if it then has no holder and no mark, false if the holder is not in it.
local function without(value)
  local first = value:find(' ' .. id .. ':', 1, true)
  if not first then return false end
  local last = (value:find(' ', first + 1, true) or #value + 1) - 1
  for digit in value:sub(first + #id + 2, last):gmatch('%x') do blocks = blocks + BITS[digit] end
  local rest = value:sub(1, first - 1) .. value:sub(last + 1)
  if rest:find(' ', 1, true) or rest:byte(#rest) == 43 then return rest end
  return ''
end

while done < count and bytes_read <= BYTES do
  local to = math.min(done + portion, count)
  for i, value in ipairs(redis.call('MGET', unpack(KEYS, 2 + done, 1 + to))) do
    local key, head, branch = KEYS[1 + done + i], ARGV[2 + done + i]:match('^(%x+):(%x+)$')
    if branch then piece = piece + 1 end
    bytes_read = bytes_read + (value and #value or 0)
    local rest = value and without(value)
    if rest == '' then
      gone[#gone + 1] = key
      if branch then left[head] = {KEYS[piece], (left[head] and left[head][2] or 0) + 1} end
    elseif rest then
      kept[#kept + 1] = key
      kept[#kept + 1] = rest
    end
  end
  portion = bytes_read < 1024 * to and 2 * portion or 4
  done = to
end

redis.call('PERSIST', KEYS[1]) -- also if Redis is full: see rule 3
if #kept > 0 then redis.call('MSET', unpack(kept)) end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
for head, each in pairs(left) do
  local number = (tonumber(redis.call('HGET', branches, head) or 0) or 0) - each[2]
  if number > 0 then
    redis.call('HSET', branches, head, string.format('%.0f', number))
  else
    -- The last branch row was deleted, so the row loses its mark.
    redis.call('HDEL', branches, head)
    local row = redis.call('MGET', each[1])[1]
    local at = row and (row:find(' ', 1, true) or #row + 1) - 1
    if row and row:byte(at) == 43 then
      if at == #row then redis.call('DEL', each[1]) else redis.call('SET', each[1], row:sub(1, at - 1) .. row:sub(at + 1)) end
    end
  end
end
redis.call('HDEL', KEYS[1], unpack(ARGV, 3, 2 + done))
return {'applied', done, blocks}
