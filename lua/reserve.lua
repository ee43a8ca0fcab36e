-- reserve(load, reservations, holders, request, spec*; milliseconds, nonce, context, weight_new, weight_active, limit, reservations_max, cold, repeatable, candidate*) -> {verdict, which, tokens, requests, overdue}
--
-- Choose the best of some targets for a prompt, by their loads at this moment, and add the reservation to its load. The
-- same call again, because its reply was lost, finds the reservation by its nonce and adds nothing.
--
-- KEYS  load              hash        the load of each target
--       reservations      zset        decisions under way, by the Redis ms at which each is over
--       holders           hash        the group's holder table; a target that is not in it is passed over
--       request           string, PX  the reservation that this request got before; there only where `repeatable`
--       spec*             string, PX  block keys of the prompt at growing depths: who will have them
-- ARGV  milliseconds      for how long from now, unless it is released before
--       nonce             random, of this call: two equal reservations are two, and the call again is one
--       context           tokens of the prompt
--       weight_new, weight_active  cost = (tokens + weight_active * requests) / weight + weight_new * new + handicap
--       limit             a target with so many requests is passed over; 0: none is
--       reservations_max  with so many under way in the group nothing more is reserved
--       cold              '1' where nobody has anything of the prompt
--       repeatable        '1': the same request again gets the same reservation
--       candidate*        publisher, new, handicap, weight, first, spec_milliseconds of each, at most 8: `new` is its prefill
--                         tokens; its speculative entries are those behind the `first` of them, for so long; 0: none
--
-- {'applied', which, tokens, requests, overdue}  the which-th was reserved; its load without the reservation
-- {'repeated', publisher, tokens, context, nonce, waited}  the request has a reservation already: this one, as it was
--                                  written; its target had so many tokens to compute before it
-- {'full', 0, 0, 0, overdue}       the group has too many reservations; nothing written but what was overdue
-- {'saturated', 0, 0, 0, overdue}  every candidate is at the limit, or gone; the same

local names, registered, members = {}, {}, {}
for i = 10, #ARGV, 6 do
  names[#names + 1] = ARGV[i]
  registered[#registered + 1] = 'publisher:' .. ARGV[i]
  members[#members + 1] = string.format('%s %.0f %s %s', ARGV[i], math.floor(tonumber(ARGV[i + 1])), ARGV[3], ARGV[2])
end
for i, due in ipairs(redis.call('ZMSCORE', KEYS[2], unpack(members))) do
  if due then
    local tokens, requests = (redis.call('HGET', KEYS[1], names[i]) or '0 0'):match('^(%d+) (%d+)')
    local new = members[i]:match('^%d+ (%d+)')
    return {'applied', i, math.max(0, tokens - new), math.max(0, requests - 1), 0}
  end
end

local first_spec = 4
if ARGV[9] == '1' then
  first_spec = 5
  local earlier = redis.call('GET', KEYS[4])
  if earlier then
    local publisher, tokens, context, nonce, waited = earlier:match('^(%d+) (%d+) (%d+) (%x+) (%d+)$')
    return {'repeated', tonumber(publisher), tonumber(tokens), tonumber(context), nonce, tonumber(waited)}
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function parsed(value)
  local numbers = {}
  for number in (value or '0 0 0 0 0 0 0'):gmatch('%d+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end
local function text(numbers) return string.format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f', unpack(numbers)) end

-- What nobody released: a replica that ended, a caller that forgot. Of all targets, so that none stays loaded.
local overdue = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 8)
for _, reservation in ipairs(overdue) do
  local publisher, tokens, context = reservation:match('^(%d+) (%d+) (%d+)')
  local value = redis.call('HGET', KEYS[1], publisher)
  if value then
    local load = parsed(value)
    load[1], load[2], load[3] = math.max(0, load[1] - tokens), math.max(0, load[2] - 1), math.max(0, load[3] - context)
    redis.call('HSET', KEYS[1], publisher, text(load))
  end
  redis.call('ZREM', KEYS[2], reservation)
end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[7]) then return {'full', 0, 0, 0, #overdue} end

local values, rows = redis.call('HMGET', KEYS[1], unpack(names)), redis.call('HMGET', KEYS[3], unpack(registered))
local limit, which, least, tokens, requests = tonumber(ARGV[6])
for i = 1, #names do
  local wait, active = 0, 0
  if values[i] then wait, active = values[i]:match('^(%d+) (%d+)') end
  if rows[i] and (limit == 0 or tonumber(active) < limit) then
    local at = 10 + 6 * (i - 1)
    local cost = (wait + ARGV[5] * active) / ARGV[at + 3] + ARGV[4] * ARGV[at + 1] + ARGV[at + 2]
    if not least or cost < least then which, least, tokens, requests = i, cost, tonumber(wait), tonumber(active) end
  end
end
if not which then return {'saturated', 0, 0, 0, #overdue} end

local chosen = 10 + 6 * (which - 1)
local load, new = parsed(values[which] or nil), math.floor(tonumber(ARGV[chosen + 1]))
load[1], load[2], load[3] = tokens + new, requests + 1, load[3] + ARGV[3]
if ARGV[8] == '1' then load[7] = now end
local reservation = members[which]
redis.call('HSET', KEYS[1], names[which], text(load))
redis.call('ZADD', KEYS[2], now + ARGV[1], reservation)
if ARGV[9] == '1' then redis.call('SET', KEYS[4], string.format('%s %.0f', reservation, tokens), 'PX', ARGV[1]) end
if ARGV[chosen + 5] ~= '0' then
  for i = first_spec + ARGV[chosen + 4], #KEYS do redis.call('SET', KEYS[i], names[which], 'PX', ARGV[chosen + 5]) end
end
return {'applied', which, tokens, requests, #overdue}
