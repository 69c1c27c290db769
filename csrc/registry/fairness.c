/* fairness.c: how the requests of a worker share its steps. See worker.h.
 *
 * Fairness is weighted fair queueing over steps. plan() is offered the active items in this order: by priority, then
 * by the service that their flow has received, then by the service that they have received within the flow. A flow is
 * the work of one tenant in one service class, as in the queue. Bulk work is charged BULK_WEIGHT times the service it
 * received. A new flow, and a new request of a flow, starts at virtual time: it counts as if it had received an equal
 * share of every step so far. So tenants share the steps however many requests each has, one request with 10,000 texts
 * shares them with small ones, and no request starves. */
#include "registry/entry.h"

/* Bulk work is charged this multiple of the service it received, so that interactive work gets this multiple of the
 * share of bulk work. */
enum { BULK_WEIGHT = 4 };

/* A request was admitted. Raises the flow, if it was idle, to virtual time, and starts the request at the flow's clock:
 * a flow or request has no claim on steps before it arrived. */
void mp_worker_enter_flow(mp_worker *w, mp_ticket *ticket) {
    bool fresh;
    int flow = mp_flows_enter(&w->flows, ticket->node.tenant, ticket->node.kind, &fresh);
    bool was_idle = w->flows.slots[flow].users == 1;
    if (fresh || (was_idle && w->flow_ns[flow] < w->virtual_ns))
        w->flow_ns[flow] = w->virtual_ns;
    ticket->flow = flow;
    ticket->virtual_ns = w->clock_ns[flow];
}

/* Charges a step that was offered n items: every planned request is charged its share of the step's time. Virtual time
 * advances by what each offered flow would get of the step, and the clock of a flow by what each of its requests would
 * get of the flow's part, if all had equal shares. */
void mp_worker_charge(mp_worker *w, int n, uint64_t took_ns) {
    int requests[MP_WORKER_FLOWS] = {0};
    uint64_t weights = 0;
    for (int i = 0; i < n; i++) {
        const mp_ticket *ticket = w->offered[i]->ticket;
        if (requests[ticket->flow]++ == 0)
            weights += ticket->item.service_class == MP_SERVICE_BULK ? 1 : BULK_WEIGHT;
    }
    w->virtual_ns += took_ns * BULK_WEIGHT / weights;
    double amount = 0;
    for (int i = 0; i < w->plan.count; i++)
        amount += w->plan.amount[i];
    for (int i = 0; i < w->plan.count; i++) {
        mp_ticket *ticket = w->plan.items[i]->ticket;
        int flow = ticket->flow;
        double share = amount > 0 ? w->plan.amount[i] / amount : 1.0 / w->plan.count;
        uint64_t had = (uint64_t)((double)took_ns * share);
        w->clock_ns[flow] += had / (uint64_t)(requests[flow] ? requests[flow] : 1);
        w->flow_ns[flow] += had * (ticket->item.service_class == MP_SERVICE_BULK ? BULK_WEIGHT : 1);
        ticket->virtual_ns += had;
        ticket->had_ns += had;
    }
}

bool mp_worker_prefers(const mp_worker *w, const mp_item *a, const mp_item *b) {
    if (a->priority != b->priority)
        return a->priority < b->priority;
    const mp_ticket *x = a->ticket, *y = b->ticket;
    uint64_t a_had = w->flow_ns[x->flow], b_had = w->flow_ns[y->flow];
    if (a_had != b_had)
        return a_had < b_had;
    a_had = x->virtual_ns;
    b_had = y->virtual_ns;
    if (a_had != b_had)
        return a_had < b_had;
    return a->sequence < b->sequence;
}
