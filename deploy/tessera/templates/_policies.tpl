{{- /* What the admission policies have in common. */ -}}

{{- /* The binding of a policy (its name) that has no parameters: it denies, everywhere. */ -}}
{{- define "tessera.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ . }}
spec:
  policyName: {{ . }}
  validationActions: [Deny]
{{- end -}}

{{- /* Nobody else is meant: kubelets delete slices, admins what they like. */ -}}
{{- define "tessera.byANodePlugin" -}}
name: by-a-node-plugin
expression: request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:tessera-node'
{{- end -}}

{{- /* The node that the token is bound to; empty for a token that is bound to none. */ -}}
{{- define "tessera.node" -}}
name: node
expression: "request.userInfo.extra[?'authentication.kubernetes.io/node-name'][0].orValue('')"
{{- end -}}

{{- /* How a refusal names the token. */ -}}
{{- define "tessera.thisToken" -}}
'this token is ' + (variables.node == '' ? 'bound to no node' : 'of node ' + variables.node)
{{- end -}}

{{- /*
Whether an expression is the name of the node's pool (driver/slices/names.py). One that is too long for a name ends in a hash
that can't be computed here: what stands before it has to do.
*/ -}}
{{- define "tessera.isOwnPool" -}}
({{ . }} == variables.pool || (variables.pool.size() > 253 && {{ . }}.size() > 200 && variables.pool.startsWith({{ . }}.substring(0, {{ . }}.size() - 11))))
{{- end -}}

{{- define "tessera.pool" -}}
name: pool
expression: variables.node + '-{{ .Values.driverName }}'
{{- end -}}

{{- /* A list that may be absent, or null. */ -}}
{{- define "tessera.listOf" -}}
(has({{ . }}) && {{ . }} != null ? {{ . }} : [])
{{- end -}}
