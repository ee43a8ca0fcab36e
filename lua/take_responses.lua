-- take_responses(queue; group, consumer, count, milliseconds) -> {verdict, entry*}
--
-- Return names of responses to copy to MongoDB: first those that another consumer has taken and not copied in time.
--
-- KEYS  queue         stream  names of responses
-- ARGV  group         the consumer group
--       consumer      the caller's name
--       count         the most entries to return
--       milliseconds  how long an entry stays with its consumer before another one may take it
--
-- {'applied', id, name, kind, ...}  three texts for each entry; `kind` is `response` or `deletion`
-- {'gone'}                          there is no queue

if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
local reply = {}
local function add(entries)
  for _, entry in ipairs(entries) do
    if entry and entry[2] then
      reply[#reply + 1] = entry[1]
      reply[#reply + 1] = entry[2][2]
      reply[#reply + 1] = entry[2][1]
    end
  end
end

local claimed = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[4], '0-0', 'COUNT', ARGV[3])
add(claimed[2])
if #claimed[2] == 0 then
  local read = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
  if read and read[1] then add(read[1][2]) end
end
return {'applied', unpack(reply)}
